//! Requests about jobs and adapters that are there already.

use std::path::PathBuf;

use super::json::{body, missing};
use super::{Host, names};
use crate::Result;

/// `{"out": FILE}`: the job that is to be paused or resumed.
///
/// # Errors
/// Names the field that is wrong.
pub fn out(bytes: &[u8]) -> Result<String> {
    let mut fields = body(bytes, false)?;
    let out = fields.string("out")?.ok_or_else(|| missing("out", "the job's `out`"))?;
    fields.finish()?;
    names::check_file_name("out", &out)?;
    Ok(out)
}

/// `{"alias": NAME}`.
///
/// # Errors
/// Names the field that is wrong.
pub fn alias(bytes: &[u8]) -> Result<String> {
    let mut fields = body(bytes, false)?;
    let alias = fields.string("alias")?.ok_or_else(|| missing("alias", "an adapter's alias"))?;
    fields.finish()?;
    Ok(alias)
}

/// `{"name": FILE}` and, if it is to go by another name than the file's, `"alias"`: an alias and
/// a file, or a folder of PEFT, of the training folder.
///
/// # Errors
/// Names the field that is wrong.
pub fn load_adapter(bytes: &[u8], host: &Host) -> Result<(String, PathBuf)> {
    let folder = host.train_dir()?;
    let mut fields = body(bytes, false)?;
    let name = fields.string("name")?;
    let alias = fields.string("alias")?;
    fields.finish()?;
    let name = name.ok_or_else(|| missing("name", "a file of the training folder"))?;
    let path = names::adapter_to_read("name", folder, &name)?;
    let (field, alias) = match alias {
        Some(alias) => ("alias", alias),
        None => ("name", names::alias_of(&name).to_string()),
    };
    names::check_alias(field, &alias, &host.name)?;
    Ok((alias, path))
}

/// A body that says nothing: empty, or `{}`.
///
/// # Errors
/// Names a field that is there.
pub fn nothing(bytes: &[u8]) -> Result<()> {
    match bytes.iter().all(u8::is_ascii_whitespace) {
        true => Ok(()),
        false => Ok(body(bytes, false)?.finish()?),
    }
}

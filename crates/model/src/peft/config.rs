//! `adapter_config.json`: what of it says how A and B are meant.

use std::collections::HashMap;

use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use serde_json::{Map, Value, json};

use crate::adapter::MOST_RANK;
use crate::{Error, Result};

/// What a configuration says of the scale of each module.
pub(super) struct Config {
    file: String,
    rank: usize,
    alpha: f64,
    rank_stabilized: bool,
    ranks: Patterns,
    alphas: Patterns,
    /// Ends of the names of adapted parameters.
    parameters: Vec<String>,
    /// What was dropped in training.
    pub(super) dropout: f32,
    /// The class of the base model in transformers, where PEFT noted it.
    pub(super) class: Option<String>,
}

/// Expressions for modules' paths, and what goes for those that match, the first first.
type Patterns = Vec<(Regex, f64)>;

/// Fields that change what A and B mean, in ways that no LoRA of GGUF can say.
const REFUSED: [(&str, &str); 10] = [
    ("lora_bias", "biases of adapters"),
    ("modules_to_save", "whole modules beside the adapter"),
    ("trainable_token_indices", "trained tokens"),
    ("layer_replication", "replicated layers"),
    ("alora_invocation_tokens", "activated LoRA"),
    ("arrow_config", "Arrow routing"),
    ("kasa_config", "KaSA"),
    ("monteclora_config", "MonteCLoRA"),
    ("velora_config", "VeLoRA"),
    ("megatron_config", "Megatron's parallel layers"),
];

/// Ways to begin that change the base model as well.
const CHANGED_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Whether a value says nothing: null, false, 0 or empty.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
    }
}

/// A value as an error shows it.
fn shown(value: &Value) -> String {
    let mut text = value.to_string();
    if text.chars().count() > 60 {
        text = text.chars().take(60).chain(['…']).collect();
    }
    text
}

impl Config {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// Names the field that is missing, wrong, or asks for what is not supported.
    pub(super) fn parse(file: &str, text: &[u8]) -> Result<Config> {
        let fields: Map<String, Value> = serde_json::from_slice(text)
            .map_err(|e| Error::new(format!("{file}: this is no JSON object: {e}")))?;
        let bad = |field: &str, value: &Value, wanted: &str| {
            Error::new(format!("{file}: field `{field}` is {}, expected {wanted}", shown(value)))
        };
        let get = |field: &str| fields.get(field).unwrap_or(&Value::Null);

        match get("peft_type") {
            Value::String(s) if s == "LORA" => {}
            other => return Err(bad("peft_type", other, "\"LORA\"")),
        }
        match get("bias") {
            Value::Null => {}
            Value::String(s) if s == "none" => {}
            other => {
                return Err(bad("bias", other, "\"none\": biases of adapters are not supported"));
            }
        }
        for (field, what) in REFUSED {
            let value = get(field);
            if !is_unset(value) {
                return Err(bad(field, value, &format!("it unset: {what} are not supported")));
            }
        }
        // `use_dora`, `use_qalora` and what will come: another formula than W + s B A.
        for (field, value) in &fields {
            if field.starts_with("use_") && field != "use_rslora" && !is_unset(value) {
                return Err(bad(
                    field,
                    value,
                    "it unset: only plain and rank-stabilized LoRA are \
                     supported",
                ));
            }
        }
        if let Value::String(how) = get("init_lora_weights")
            && CHANGED_BASE.iter().any(|known| how.starts_with(known))
        {
            return Err(bad(
                "init_lora_weights",
                get("init_lora_weights"),
                "an adapter of an unchanged base; save it with PEFT's \
                 `path_initial_model_for_weight_conversion`",
            ));
        }
        let number = |field: &str, value: &Value| match value.as_f64() {
            Some(x) if x.is_finite() && x as f32 != 0.0 && (x as f32).is_finite() => Ok(x),
            _ => Err(bad(field, value, "a finite number other than 0")),
        };
        let rank = |field: &str, value: &Value| match value.as_u64() {
            Some(n) if (1..=MOST_RANK as u64).contains(&n) => Ok(n as usize),
            _ => Err(bad(field, value, &format!("1 to {MOST_RANK}"))),
        };
        let rank_stabilized = match get("use_rslora") {
            Value::Null | Value::Bool(false) => false,
            Value::Bool(true) => true,
            other => return Err(bad("use_rslora", other, "true or false")),
        };
        let patterns = |field: &str| -> Result<Vec<(Regex, Value)>> {
            match get(field) {
                Value::Null => Ok(Vec::new()),
                Value::Object(map) => map
                    .iter()
                    .map(|(key, value)| Ok((expression(file, field, key)?, value.clone())))
                    .collect(),
                other => Err(bad(field, other, "an object of names and numbers")),
            }
        };
        let mut ranks = Vec::new();
        for (key, value) in patterns("rank_pattern")? {
            ranks.push((key, rank("rank_pattern", &value)? as f64));
        }
        let mut alphas = Vec::new();
        for (key, value) in patterns("alpha_pattern")? {
            alphas.push((key, number("alpha_pattern", &value)?));
        }
        let parameters = match get("target_parameters") {
            Value::Null => Vec::new(),
            value => {
                let wanted = || bad("target_parameters", value, "an array of names");
                let names = value.as_array().ok_or_else(wanted)?.iter();
                names
                    .map(|name| name.as_str().map(String::from).ok_or_else(wanted))
                    .collect::<Result<_>>()?
            }
        };
        let dropout = match get("lora_dropout") {
            Value::Null => 0.0,
            value => match value.as_f64().filter(|p| (0.0..=1.0).contains(p)) {
                Some(p) => p as f32,
                None => return Err(bad("lora_dropout", value, "a number from 0 to 1")),
            },
        };
        let class = get("auto_mapping").get("base_model_class").and_then(Value::as_str);
        Ok(Config {
            file: file.to_string(),
            rank: rank("r", get("r"))?,
            alpha: number("lora_alpha", get("lora_alpha"))?,
            rank_stabilized,
            ranks,
            alphas,
            parameters,
            dropout,
            class: class.map(str::to_string),
        })
    }

    /// The greatest rank that a module may have.
    pub(super) fn most_rank(&self) -> usize {
        self.ranks.iter().fold(self.rank, |most, &(_, rank)| most.max(rank as usize))
    }

    /// The name that patterns are held against, of what has tensors under a path: the path of a
    /// module, or the name of its weight where that is adapted as a parameter.
    pub(super) fn key(&self, path: &str) -> String {
        let weight = format!("{path}.weight");
        match self.parameters.iter().any(|end| ends_in(&weight, end)) {
            true => weight,
            false => path.to_string(),
        }
    }

    /// The rank of a module or parameter, and the alpha that gives its scale divided by the rank:
    /// `lora_alpha`, or `lora_alpha * sqrt(rank)` where that is what the scale is divided by
    /// (Kalajdzievski 2023, arXiv 2312.03732).
    ///
    /// # Errors
    /// When the alpha is beyond f32.
    pub(super) fn of(&self, key: &str) -> Result<(usize, f32)> {
        let first = |patterns: &Patterns| {
            patterns.iter().find(|(pattern, _)| pattern.is_match(key)).map(|&(_, value)| value)
        };
        let rank = first(&self.ranks).map_or(self.rank, |rank| rank as usize);
        let alpha = first(&self.alphas).unwrap_or(self.alpha);
        let alpha = if self.rank_stabilized { alpha * (rank as f64).sqrt() } else { alpha };
        match alpha as f32 {
            alpha if alpha.is_finite() => Ok((rank, alpha)),
            _ => Err(Error::new(format!("{}: alpha {alpha} is too large", self.file))),
        }
    }
}

/// Whether a name is `end`, or ends in it from a dot on.
fn ends_in(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// PEFT's `get_pattern_key`: an expression for the end of a path, from a dot on.
fn expression(file: &str, field: &str, key: &str) -> Result<Regex> {
    let config = Regex::config().nfa_size_limit(Some(1 << 20)).hybrid_cache_capacity(1 << 18);
    Regex::builder()
        .configure(config)
        .syntax(syntax::Config::new().nest_limit(50))
        .build(&format!(r"^(?:.*\.)?(?:{key})$"))
        .map_err(|_| {
            let key = shown(&Value::String(key.into()));
            Error::new(format!(
                "{file}: field `{field}` has the key {key}, which is no regular expression that \
                 Gradus knows; name the module instead"
            ))
        })
}

/// A module of an adapter to be written.
pub(super) struct Written {
    /// Its path: `model.layers.0.self_attn.q_proj`.
    pub(super) path: String,
    /// Whether it is a parameter, which PEFT lists elsewhere.
    pub(super) parameter: bool,
    pub(super) rank: usize,
    /// What the scale times the rank is.
    pub(super) alpha: f64,
}

/// A parameter that PEFT makes of modules beside transformers 5, which has none for routers and
/// experts any more. It holds patterns against the name of the parameter alone.
pub(super) struct Converted {
    pub(super) parameter: Written,
    /// What it multiplies the usual rank and alpha by: how many modules become one.
    pub(super) modules: f64,
}

impl Written {
    /// What all of its kind end in: `q_proj`; of a parameter, which is found by its module's name
    /// and its own, `mlp.gate.weight`.
    fn kind(&self) -> &str {
        self.end(if self.parameter { 3 } else { 1 })
    }

    /// The last parts of the path.
    fn end(&self, parts: usize) -> &str {
        let dot = self.path.rmatch_indices('.').nth(parts - 1);
        dot.map_or(&self.path, |(dot, _)| self.path.get(dot + 1..).unwrap_or_default())
    }
}

/// What is not `usual`, under keys as PEFT matches them: from a dot to the end of a path. A key is
/// the kind of a module, or else with the name before it, where everything that it matches has
/// this value; else the whole path. So it does not matter which key is looked at first.
fn pattern(
    modules: &[Written],
    converted: &[Converted],
    value: &dyn Fn(&Written) -> f64,
    usual: f64,
) -> Value {
    let converted = converted.iter().map(|c| (&c.parameter, usual * c.modules));
    let all: Vec<(&Written, f64)> = modules.iter().map(|m| (m, usual)).chain(converted).collect();
    // Of each end of a path the value, where all have one.
    let mut ends: HashMap<&str, Option<f64>> = HashMap::new();
    for &(module, _) in &all {
        let mine = value(module);
        let dots = module.path.match_indices('.').map(|(dot, _)| dot + 1);
        for start in std::iter::once(0).chain(dots) {
            let end = module.path.get(start..).unwrap_or_default();
            let known = ends.entry(end).or_insert(Some(mine));
            *known = known.filter(|&known| known == mine);
        }
    }
    let mut map = Map::new();
    for (module, _) in all.into_iter().filter(|(m, usual)| value(m) != *usual) {
        let short = [module.kind(), module.end(2)];
        let one =
            |key: &&str| ends_in(key, module.kind()) && ends.get(key).is_some_and(Option::is_some);
        let key = short.into_iter().find(one).unwrap_or(&module.path);
        map.insert(key.to_string(), plain(value(module)));
    }
    Value::Object(map)
}

/// The file of an adapter with these modules, of which PEFT may make the converted ones. `everywhere` says of a module whether all of its
/// name, such as `q_proj`, have an adapter.
pub(super) fn text(
    base: &str,
    dropout: f32,
    modules: &[Written],
    converted: &[Converted],
    everywhere: &dyn Fn(&Written) -> bool,
) -> Result<Vec<u8>> {
    let most = |value: &dyn Fn(&Written) -> f64| {
        let mut counts: Vec<(f64, usize)> = Vec::new();
        for module in modules {
            let value = value(module);
            match counts.iter_mut().find(|(known, _)| *known == value) {
                Some((_, n)) => *n += 1,
                None => counts.push((value, 1)),
            }
        }
        // The first of the most frequent.
        counts.iter().rev().max_by_key(|(_, n)| *n).map_or(1.0, |&(value, _)| value)
    };
    let rank = most(&|m| m.rank as f64);
    let alpha = most(&|m| m.alpha);
    let names = |parameters: bool| -> Vec<&str> {
        let mut names = Vec::new();
        for module in modules.iter().filter(|m| m.parameter == parameters) {
            let name = if everywhere(module) { module.kind() } else { &module.path };
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    };
    // Of parameters PEFT takes no dropout, and would refuse the folder; nothing that is served
    // depends on it. As people write it: 0.1 is not 0.10000000149011612.
    let lora_dropout = match modules.iter().any(|m| m.parameter) {
        true => 0.0,
        false => dropout.to_string().parse().unwrap_or(f64::from(dropout)),
    };
    let config = json!({
        "alpha_pattern": pattern(modules, converted, &|m| m.alpha, alpha),
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": plain(alpha),
        "lora_dropout": lora_dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": rank as u64,
        "rank_pattern": pattern(modules, converted, &|m| m.rank as f64, rank),
        "target_modules": names(false),
        "target_parameters": Some(names(true)).filter(|names| !names.is_empty()),
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    });
    let mut text = serde_json::to_vec_pretty(&config)
        .map_err(|e| Error::new(format!("the adapter's configuration cannot be written: {e}")))?;
    text.push(b'\n');
    Ok(text)
}

/// A whole number as one: PEFT's alpha is an integer, though it takes others.
fn plain(x: f64) -> Value {
    if x == x.trunc() && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Result<Config> {
        Config::parse("adapter_config.json", text.as_bytes())
    }

    #[test]
    fn f23_rank_stabilized_scales() {
        let plain = config(r#"{"peft_type":"LORA","r":16,"lora_alpha":16}"#).unwrap();
        assert_eq!(plain.of("a").unwrap(), (16, 16.0));
        let text = r#"{"peft_type":"LORA","r":16,"lora_alpha":16,"use_rslora":true}"#;
        let (rank, alpha) = config(text).unwrap().of("a").unwrap();
        assert_eq!(alpha / rank as f32, 4.0);
    }

    #[test]
    fn patterns_are_those_of_peft() {
        let text = r#"{"peft_type":"LORA","r":8,"lora_alpha":8,"use_rslora":false,
            "rank_pattern":{"layers.0.self_attn.q_proj":4,"q_proj":2,"^mlp.+":1,".*up_proj":16},
            "alpha_pattern":{"v_proj":1.5}}"#;
        let config = config(text).unwrap();
        for (path, expected) in [
            ("model.layers.0.self_attn.q_proj", (4, 8.0)),
            ("model.layers.1.self_attn.q_proj", (2, 8.0)),
            ("model.layers.1.self_attn.xq_proj", (8, 8.0)),
            ("model.layers.1.self_attn.v_proj", (8, 1.5)),
            ("model.layers.1.mlp.up_proj", (16, 8.0)),
            ("mlp.down_proj", (1, 8.0)),
        ] {
            assert_eq!(config.of(path).unwrap(), expected, "{path}");
        }
    }

    /// PEFT holds patterns against the name of a parameter where that is what is adapted, and against
    /// a module's path where the module is: never against both.
    #[test]
    fn patterns_match_parameters_by_their_own_name() {
        let text = r#"{"peft_type":"LORA","r":8,"lora_alpha":8,"target_modules":["q_proj"],
            "target_parameters":["mlp.gate.weight","x.weight"],
            "rank_pattern":{"weight":4,"gate":2},"alpha_pattern":{"gate.weight":1.5}}"#;
        let config = config(text).unwrap();
        for (path, expected) in [
            ("model.layers.0.mlp.gate", (4, 1.5)),
            ("model.layers.0.self_attn.q_proj", (8, 8.0)),
            ("model.layers.0.other_mlp.gate", (2, 8.0)),
            ("x", (4, 8.0)),
        ] {
            assert_eq!(config.of(&config.key(path)).unwrap(), expected, "{path}");
        }
    }

    #[test]
    fn what_is_not_supported_is_refused_by_field() {
        for (more, field) in [
            (r#","use_dora":true"#, "use_dora"),
            (r#","use_qalora":true"#, "use_qalora"),
            (r#","use_something_new":{"a":1}"#, "use_something_new"),
            (r#","bias":"all""#, "bias"),
            (r#","lora_bias":true"#, "lora_bias"),
            (r#","modules_to_save":["lm_head"]"#, "modules_to_save"),
            (r#","layer_replication":[[0,4]]"#, "layer_replication"),
            (r#","init_lora_weights":"pissa_niter_4""#, "init_lora_weights"),
            (r#","alora_invocation_tokens":[1]"#, "alora_invocation_tokens"),
            (r#","rank_pattern":{"(":4}"#, "rank_pattern"),
            (r#","rank_pattern":{"a":0}"#, "rank_pattern"),
            (r#","rank_pattern":[1]"#, "rank_pattern"),
            (r#","alpha_pattern":{"a":"b"}"#, "alpha_pattern"),
            (r#","use_rslora":1"#, "use_rslora"),
            (r#","target_parameters":"all""#, "target_parameters"),
            (r#","target_parameters":[1]"#, "target_parameters"),
            (r#","lora_dropout":1.5"#, "lora_dropout"),
            (r#","lora_dropout":-0.1"#, "lora_dropout"),
            (r#","lora_dropout":"some""#, "lora_dropout"),
        ] {
            let text = format!(r#"{{"peft_type":"LORA","r":8,"lora_alpha":8{more}}}"#);
            let error = config(&text).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(&format!("field `{field}`")), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        for text in [
            "",
            "[]",
            "{",
            "{}",
            r#"{"peft_type":"LORA"}"#,
            r#"{"peft_type":"LORA","r":8}"#,
            r#"{"peft_type":"LORA","r":-8,"lora_alpha":1}"#,
            r#"{"peft_type":"LORA","r":99999,"lora_alpha":1}"#,
            r#"{"peft_type":"LORA","r":8,"lora_alpha":0}"#,
            r#"{"peft_type":"LORA","r":8,"lora_alpha":1e300}"#,
            r#"{"peft_type":"IA3","r":8,"lora_alpha":1}"#,
        ] {
            assert!(config(text).is_err(), "{text}");
        }
        // Defaults as PEFT writes them, whether or not they are known here.
        let text = r#"{"peft_type":"LORA","r":8,"lora_alpha":8,"bias":"none","loftq_config":{},
            "megatron_core":"megatron.core","use_dora":false,"use_bdlora":null,"qalora_group_size":16,
            "fan_in_fan_out":true,"init_lora_weights":true,"new_field":"x","modules_to_save":[]}"#;
        assert!(config(text).is_ok());
    }
}

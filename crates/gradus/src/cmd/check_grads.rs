//! `gradus check-grads`.

use clap::ValueEnum;
use graph::Device;
use reference::check;

use crate::error::{Error, FAULT, Result};
use crate::options::DeviceArgs;
use crate::output::{json, print};

/// Check the gradient of every op, and the kernels that compute it
///
/// First, each gradient rule, evaluated in 64-bit floats, against central differences of the op
/// itself; then the device's values and gradients against the same in 64-bit floats. The error
/// of an element is |a-b|/(|a|+|b|). An element over the bound is excused where |a-b| is within
/// the bound times the rms of its tensor; more than 5 % of such elements fail a case.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus check-grads                     every op, on this processor
  gradus check-grads --op attention
  GRADUS_CPU=portable gradus check-grads
  gradus check-grads --device reference  the gradient rules alone
  gradus check-grads --programs 100000   random programs of all ops instead")]
pub struct Args {
    /// Only ops whose name contains this
    #[arg(long, value_name = "NAME")]
    op: Option<String>,

    /// Whose kernels to check
    #[arg(long, value_enum, default_value = "cpu")]
    device: Which,

    /// Seed of the inputs
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Check so many random programs of all ops instead of each op's cases: that each is
    /// differentiated or refused as predicted, and along one direction; one in 50 on the device
    #[arg(long, value_name = "N", conflicts_with = "op")]
    programs: Option<u64>,

    #[command(flatten)]
    threads: DeviceArgs,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// The rules alone, in 64-bit floats
    Reference,
    /// This processor
    Cpu,
}

pub fn run(args: &Args) -> Result<()> {
    let device = match args.device {
        Which::Reference => None,
        Which::Cpu => Some(args.threads.open()?),
    };
    let device: Option<&dyn Device> = device.as_deref();
    if let Some(count) = args.programs {
        return programs(args, device, count);
    }
    let report = check::check_all(device, args.seed, args.op.as_deref());
    if report.ops.is_empty() {
        let known: Vec<&str> = check::op_names().collect();
        let asked = args.op.as_deref().unwrap_or_default();
        return Err(Error::invalid(format!(
            "no op's name contains `{asked}`; there are {}",
            known.join(", ")
        )));
    }
    if args.json {
        let report = serde_json::to_value(&report)
            .map_err(|e| Error::fault(format!("the report is no JSON: {e}")))?;
        json(&report)?;
    } else {
        print(&report.to_string())?;
    }
    if report.passed() {
        return Ok(());
    }
    let failed = report.ops.iter().map(|op| op.failures.len()).sum::<usize>();
    Err(Error::Failed { message: format!("{failed} checks failed"), code: FAULT })
}

/// Of so many programs, one also runs on the device.
const DEVICE_SHARE: u64 = 50;

fn programs(args: &Args, device: Option<&dyn Device>, count: u64) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let device = device.map(|device| (device, DEVICE_SHARE));
    let report = check::check_programs(device, args.seed, 0..count, threads);
    if args.json {
        let report = serde_json::to_value(&report)
            .map_err(|e| Error::fault(format!("the report is no JSON: {e}")))?;
        json(&report)?;
    } else {
        print(&report.to_string())?;
    }
    if report.passed() {
        return Ok(());
    }
    let message = format!("{} programs failed", report.failures.len());
    Err(Error::Failed { message, code: FAULT })
}

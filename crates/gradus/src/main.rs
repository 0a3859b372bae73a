//! The `gradus` command: options, progress bars and printing. What the commands do is the
//! business of the crates below.
//!
//! Results go to standard output, everything else to standard error. The exit code is 0, or
//! that of the error's kind: 1 where the input is wrong, 2 where something cannot be done, 3
//! where it broke while running; 130 after Ctrl-C.

mod cli;
mod cmd;
mod data;
mod error;
mod interrupt;
mod memory;
mod options;
mod output;
mod outputs;
mod progress;
mod reading;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}

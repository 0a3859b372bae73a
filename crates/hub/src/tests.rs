//! No test needs a network: packages come from a server on this machine, or from a pip that is
//! a shell script.

mod direct;
mod fixture;
mod hf;
mod local;
#[cfg(unix)]
mod pip;
mod server;
mod wheel;

//! One module per command.

pub mod adapter;
pub mod bench;
pub mod chat;
pub mod check_grads;
pub mod data;
pub mod demo;
mod demo_moe;
pub mod dump;
pub mod eval;
pub mod inspect;
pub mod make_toy;
pub mod merge;
pub mod perplexity;
pub mod pull;
pub mod run;
pub mod runs;
pub mod serve;
pub mod tokenize;
pub mod train;

//! One module per command.

pub mod bench;
pub mod chat;
pub mod check_grads;
pub mod demo;
pub mod dump;
pub mod inspect;
pub mod make_toy;
pub mod perplexity;
pub mod pull;
pub mod run;
pub mod serve;
pub mod tokenize;
pub mod train;

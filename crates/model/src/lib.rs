//! GGUF models as graphs: architectures, weights, caches, adapters, and the engine that runs
//! batches of rows over them.
//!
//! Knows: what the tensors of a model mean, which graph computes them, how sequences are kept
//! in a paged cache, how text becomes tokens and tokens become text.
//! Must not know: HTTP, jobs, losses, optimizers, or how a device computes an op.
//!
//! - An architecture is one file in [`arch`]: a function from hyper-parameters to graph nodes.
//! - [`Net`] is what it builds with: every projection goes through [`Net::linear`] or
//!   [`Net::experts`], every embedding through [`Net::embed`], which is where adapters apply.
//! - [`Model`] is a loaded file; [`Engine`] runs rows of many sequences over it.
#![deny(clippy::indexing_slicing)]

mod adapter;
pub mod arch;
mod cache;
mod describe;
mod engine;
mod error;
mod fingerprint;
mod footprint;
mod generate;
mod merge;
mod model;
mod net;
mod peft;
mod perplexity;
mod score;
mod skeleton;
pub mod toy;
mod weights;

pub use adapter::{Adapter, AdapterId, Base, LoraTensor};
pub use arch::{Architecture, Geometry};
pub use cache::{Cache, SeqId};
pub use describe::{AdapterInfo, PairInfo, describe_adapter};
pub use engine::{Engine, EngineConfig, Rows, WantLogits};
pub use error::{Error, Result};
pub use fingerprint::Fnv;
pub use footprint::arena_bytes;
pub use generate::{Finish, GenerateConfig, Generated, Prompt, generate, generate_all};
pub use merge::{MergeConfig, MergedTensor, merge};
pub use model::{Model, thread_count};
pub use net::{
    EntryStates, Experts, LoraShape, Net, NetConfig, PrefixShape, Projection, StateNodes,
};
pub use perplexity::{Perplexity, perplexity};
pub use score::{Scored, ToScore, not_finite, score};
pub use skeleton::Skeleton;
pub use weights::{TensorSource, Weight, Weights};

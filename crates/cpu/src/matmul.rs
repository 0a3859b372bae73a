//! Matrix products.

mod codes;
pub(crate) mod quantized;
#[cfg(test)]
pub(crate) mod testing;
mod unpack;

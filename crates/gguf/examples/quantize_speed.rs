//! How fast one thread makes blocks of each format, in MB of f32 per second.

#![allow(clippy::unwrap_used, reason = "an example may panic")]

use std::time::Instant;

use gguf::blocks::{QUANTIZABLE, quantize};

fn main() {
    let mut state = 7u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let x: Vec<f32> = (0..1 << 20).map(|_| next() + next() + next()).collect();
    for ty in QUANTIZABLE {
        let mut out = vec![0; ty.row_bytes(x.len()).unwrap()];
        let start = Instant::now();
        let mut times = 0.0;
        while start.elapsed().as_secs_f64() < 0.5 {
            quantize(ty, &x, &mut out).unwrap();
            times += 1.0;
        }
        let rate = times * 4.0 * x.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
        println!("{:5} {rate:8.0} MB/s", ty.name());
    }
}

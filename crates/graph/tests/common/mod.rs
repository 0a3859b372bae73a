//! What the tests of this crate share: a device that answers but does not run, random graphs,
//! and a symbolic run of plans.
#![allow(dead_code)] // each test file uses its own part
#![allow(missing_docs)]

pub mod check;
pub mod random;
pub mod symbolic;
pub mod toy;

use std::sync::Arc;

use gradus_graph::*;

/// A device that answers `supports` with a closure, and refuses to run anything.
pub struct TestDevice<F>(pub F);

impl<F> Device for TestDevice<F>
where
    F: Fn(&Call<'_>) -> std::result::Result<Needs, Unsupported> + Send + Sync,
{
    fn name(&self) -> &'static str {
        "paper"
    }

    fn family(&self) -> &'static str {
        "test"
    }

    fn supports(&self, call: &Call<'_>) -> std::result::Result<Needs, Unsupported> {
        (self.0)(call)
    }

    fn load(&self, _: &HostTensor<'_>) -> std::result::Result<Arc<dyn Resident>, Fault> {
        Err(Fault::new(Code::Internal, "", "a device of paper"))
    }

    fn arena(&self, _: usize) -> std::result::Result<Box<dyn Arena>, Fault> {
        Err(Fault::new(Code::Internal, "", "a device of paper"))
    }

    fn run(
        &self,
        _: &Plan,
        _: &[Leaf<'_>],
        _: &mut dyn Arena,
        _: Segment,
        _: &dyn Stop,
    ) -> std::result::Result<Progress, Fault> {
        Err(Fault::new(Code::Internal, "", "a device of paper"))
    }
}

/// Takes every operand as it lies.
pub fn any_layout() -> impl Device {
    TestDevice(|_: &Call<'_>| Ok(Needs::default()))
}

/// Only `Copy` reads strided operands.
pub fn dense_only() -> impl Device {
    TestDevice(|call: &Call<'_>| match call.args.iter().position(|a| !a.is_contiguous()) {
        Some(i) if !matches!(call.op, Op::Copy) => Err(Unsupported::Layout(i)),
        _ => Ok(Needs::default()),
    })
}

/// Takes some strided operands and not others, always the same ones.
pub fn picky(seed: u64) -> impl Device {
    TestDevice(move |call: &Call<'_>| {
        for (i, arg) in call.args.iter().enumerate() {
            let mut rng = Rng(seed ^ hash(&format!("{:?} {i} {arg:?}", call.op)));
            if !arg.is_contiguous() && !matches!(call.op, Op::Copy) && rng.below(2) == 0 {
                return Err(Unsupported::Layout(i));
            }
        }
        Ok(Needs { scratch: call.args.len(), kept: 0 })
    })
}

pub fn shape(dims: &[usize]) -> Shape {
    Shape::new(dims).unwrap()
}

/// A 64-bit mix (splitmix64), one to one.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

pub fn hash(text: &str) -> u64 {
    text.bytes().fold(0, |h, b| mix(h ^ u64::from(b)))
}

/// A small generator of random numbers: the same seed gives the same test.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    /// A number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A permutation of `0 .. n`.
    pub fn permutation(&mut self, n: usize) -> Vec<u8> {
        let mut perm: Vec<u8> = (0..n as u8).collect();
        for i in (1..n).rev() {
            perm.swap(i, self.below(i + 1));
        }
        perm
    }
}

//! A device with a shortcoming.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

use std::sync::{Arc, Mutex};

use graph::{
    Arena, Call, Code, Device, Fault, HostTensor, Leaf, Needs, Plan, Progress, Resident, Segment,
    Stop, Unsupported,
};

/// A processor that has no kernel for an op, faults or panics at the first step of another.
pub struct Odd {
    inner: cpu::Cpu,
    pub lacks: Mutex<&'static str>,
    pub faults: Mutex<&'static str>,
    pub panics: Mutex<&'static str>,
    /// What it says is free, if not what is.
    pub free: Mutex<Option<usize>>,
}

impl Odd {
    pub fn new() -> Arc<Odd> {
        Arc::new(Odd {
            inner: cpu::Cpu::new(2, None).unwrap(),
            lacks: Mutex::new(""),
            faults: Mutex::new(""),
            panics: Mutex::new(""),
            free: Mutex::default(),
        })
    }
}

impl Device for Odd {
    fn name(&self) -> &'static str {
        "odd"
    }

    fn family(&self) -> &'static str {
        "test"
    }

    fn supports(&self, call: &Call<'_>) -> Result<Needs, Unsupported> {
        match *self.lacks.lock().unwrap() == call.op.name() {
            true => Err(Unsupported::Kernel(call.op.name().into())),
            false => self.inner.supports(call),
        }
    }

    fn load(&self, tensor: &HostTensor<'_>) -> Result<Arc<dyn Resident>, Fault> {
        self.inner.load(tensor)
    }

    fn available(&self) -> Option<usize> {
        self.free.lock().unwrap().or(self.inner.available())
    }

    fn arena(&self, bytes: usize) -> Result<Box<dyn Arena>, Fault> {
        self.inner.arena(bytes)
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        from: Segment,
        stop: &dyn Stop,
    ) -> Result<Progress, Fault> {
        let has = |op: &str| plan.steps.iter().find(|s| s.op.name() == op);
        let faults = *self.faults.lock().unwrap();
        if let Some(step) = has(faults) {
            return Err(Fault::new(Code::Internal, &*step.name, "the device broke down"));
        }
        let panics = *self.panics.lock().unwrap();
        assert!(has(panics).is_none(), "{panics}");
        self.inner.run(plan, leaves, arena, from, stop)
    }
}

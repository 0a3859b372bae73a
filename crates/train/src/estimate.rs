//! How long a run takes, told before it starts: what its graphs cost, at rates measured now.

use std::time::{Duration, Instant};

use graph::{
    Binary, Cost, DType, Device, GradPrecision, Graph, HostTensor, Leaf, NodeId, Op, Segment,
    Shape, Unary,
};

use crate::{Error, Result};

/// Nothing is measured again after so long.
const ENOUGH: Duration = Duration::from_millis(100);

/// How fast a device is, as measured with products and sums of its own.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Rates {
    /// Multiplications with an addition of floats, a second.
    pub float: f64,
    /// The same of 8-bit blocks, a second.
    pub block: f64,
    /// The same of gradients through blocks in bf16, a second.
    pub bf16: f64,
    /// The same of gradients through blocks in int16, a second.
    pub int16: f64,
    /// Exponentials a second.
    pub functions: f64,
    /// Bytes read and written, a second.
    pub bytes: f64,
}

impl Rates {
    /// Seconds that something takes.
    pub fn seconds(&self, cost: &Cost) -> f64 {
        let products = cost.float / self.float + cost.block / self.block;
        let rounded = cost.bf16 / self.bf16 + cost.int16 / self.int16;
        products + rounded + cost.functions / self.functions + cost.bytes / self.bytes
    }

    /// Measures a device with graphs that take some 16 MiB and some milliseconds each: gradients in
    /// each precision, since a job may ask for any.
    ///
    /// # Errors
    /// When the device has no kernel for a product or a sum, or memory is out.
    pub fn measure(device: &dyn Device) -> Result<Rates> {
        const ROWS: usize = 256;
        const WIDTH: usize = 1024;
        let shape = |dims: &[usize]| Shape::new(dims);
        let mut float = Graph::new();
        let a = float.leaf("a", shape(&[ROWS, WIDTH])?, DType::F32)?;
        let b = float.leaf("b", shape(&[WIDTH, WIDTH])?, DType::F32)?;
        let product = Op::MatMul { ta: false, tb: true };
        let y = float.push(product.clone(), &[a, b], "y")?;
        let (rows, square) = (vec![0.5f32; ROWS * WIDTH], vec![0.5f32; WIDTH * WIDTH]);
        let leaf = |values: &[f32]| -> Vec<u8> { bytemuck::cast_slice(values).to_vec() };
        let (rows, square) = (leaf(&rows), leaf(&square));
        let seconds = time(device, &float, y, &[Leaf::Host(&rows), Leaf::Host(&square)])?;
        let madds = (ROWS * WIDTH * WIDTH) as f64;
        let float_rate = madds / seconds;

        let mut block = Graph::new();
        let ty = DType::Block(gguf::TensorType::Q8_0);
        let of = shape(&[WIDTH, WIDTH])?;
        let a = block.leaf("a", shape(&[ROWS, WIDTH])?, DType::F32)?;
        let w = block.weight("w", of, ty)?;
        let y = block.project(a, w)?;
        let zeros = vec![0u8; of.bytes(ty).unwrap_or(0)];
        let resident = device.load(&HostTensor { dtype: ty, shape: of, bytes: &zeros })?;
        let leaves = [Leaf::Host(&rows), Leaf::Resident(resident.as_ref())];
        let block_rate = madds / time(device, &block, y, &leaves)?;

        let rounded = |precision: GradPrecision| -> Result<f64> {
            let mut rounded = Graph::new();
            let a = rounded.leaf("a", shape(&[ROWS, WIDTH])?, DType::F32)?;
            let w = rounded.weight("w", of, ty)?;
            let cast = rounded.cast(a, precision.dtype())?;
            let y = rounded.push(Op::MatMul { ta: false, tb: false }, &[cast, w], "y")?;
            Ok(madds / time(device, &rounded, y, &leaves)?)
        };
        let (bf16, int16) = (rounded(GradPrecision::Bf16)?, rounded(GradPrecision::Int16)?);

        let mut sum = Graph::new();
        let n = 1 << 21;
        let a = sum.leaf("a", shape(&[n])?, DType::F32)?;
        let b = sum.leaf("b", shape(&[n])?, DType::F32)?;
        let y = sum.push(Op::Binary(Binary::Add), &[a, b], "y")?;
        let values = leaf(&vec![0.5f32; n]);
        let seconds = time(device, &sum, y, &[Leaf::Host(&values), Leaf::Host(&values)])?;
        let bytes = (n * 12) as f64 / seconds;

        // Values that stay in the caches, so that it is not moving them that is measured.
        let mut exp = Graph::new();
        let n = 1 << 16;
        let a = exp.leaf("a", shape(&[n])?, DType::F32)?;
        let y = exp.push(Op::Unary(Unary::Exp), &[a], "y")?;
        let functions = n as f64 / time(device, &exp, y, &[Leaf::Host(&leaf(&vec![0.5; n]))])?;
        Ok(Rates { float: float_rate, block: block_rate, bf16, int16, functions, bytes })
    }
}

/// The shortest time of a few runs, in seconds: of one, where that takes long. Leaves are in the
/// order they were made.
fn time(device: &dyn Device, graph: &Graph, output: NodeId, leaves: &[Leaf<'_>]) -> Result<f64> {
    let plan = graph::plan(graph, &[output], device)?;
    let order = plan.leaves.iter().map(|slot| slot.node.index());
    let mut sorted: Vec<usize> = order.clone().collect();
    sorted.sort_unstable();
    let place = |node: usize| sorted.iter().position(|&n| n == node);
    let bound = order.map(|node| place(node).and_then(|at| leaves.get(at)).copied());
    let bound: Option<Vec<Leaf<'_>>> = bound.collect();
    let bound = bound.ok_or_else(|| Error::Stopped("a leaf is not bound".into()))?;
    let mut arena = device.arena(plan.arena_bytes)?;
    let mut best = f64::INFINITY;
    let first = Instant::now();
    for _ in 0..4 {
        let began = Instant::now();
        device.run(&plan, &bound, arena.as_mut(), Segment::default(), &())?;
        best = best.min(began.elapsed().as_secs_f64());
        if first.elapsed() > ENOUGH {
            break;
        }
    }
    Ok(best.max(1e-9))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use graph::{Arena, Call, Fault, Needs, Plan, Progress, Resident, Stop, Unsupported};

    use super::*;

    /// Notes what products of blocks multiply.
    struct Watched(cpu::Cpu, Mutex<Vec<DType>>);

    impl Device for Watched {
        fn name(&self) -> &'static str {
            self.0.name()
        }

        fn family(&self) -> &'static str {
            self.0.family()
        }

        fn supports(&self, call: &Call<'_>) -> std::result::Result<Needs, Unsupported> {
            self.0.supports(call)
        }

        fn load(&self, tensor: &HostTensor<'_>) -> std::result::Result<Arc<dyn Resident>, Fault> {
            self.0.load(tensor)
        }

        fn arena(&self, bytes: usize) -> std::result::Result<Box<dyn Arena>, Fault> {
            self.0.arena(bytes)
        }

        fn run(
            &self,
            plan: &Plan,
            leaves: &[Leaf<'_>],
            arena: &mut dyn Arena,
            from: Segment,
            stop: &dyn Stop,
        ) -> std::result::Result<Progress, Fault> {
            let products = plan.steps.iter().filter(|step| matches!(step.op, Op::MatMul { .. }));
            let left = products.filter_map(|step| step.args.first()).map(|a| a.arg.dtype);
            self.1.lock().unwrap().extend(left);
            self.0.run(plan, leaves, arena, from, stop)
        }
    }

    #[test]
    fn each_precision_is_measured_whatever_the_device_takes_by_itself() {
        let device = Watched(cpu::Cpu::new(1, None).unwrap(), Mutex::default());
        let rates = Rates::measure(&device).unwrap();
        let mut measured = device.1.into_inner().unwrap();
        measured.dedup();
        assert_eq!(measured, [DType::F32, DType::Q8Rows, DType::BF16, DType::Int16Rows]);
        let Rates { float, block, bf16, int16, functions, bytes } = rates;
        for rate in [float, block, bf16, int16, functions, bytes] {
            assert!(rate > 0.0 && rate.is_finite(), "{rates:?}");
        }
    }
}

//! How long a run takes, told before it starts: what its graphs cost, at rates measured now.

use std::time::Instant;

use graph::{
    Binary, Cost, DType, Device, GradPrecision, Graph, HostTensor, Leaf, NodeId, Op, Segment,
    Shape, Unary,
};

use crate::{Error, Result};

/// How fast a device is, as measured with products and sums of its own.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Rates {
    /// Multiplications with an addition of floats, a second.
    pub float: f64,
    /// The same of 8-bit blocks, a second.
    pub block: f64,
    /// The same of gradients through blocks in the precision that is fastest, a second.
    pub rounded: f64,
    /// Exponentials a second.
    pub functions: f64,
    /// Bytes read and written, a second.
    pub bytes: f64,
}

impl Rates {
    /// Seconds that something takes.
    pub fn seconds(&self, cost: &Cost) -> f64 {
        let products = cost.float / self.float + cost.block / self.block;
        let products = products + cost.rounded / self.rounded;
        products + cost.functions / self.functions + cost.bytes / self.bytes
    }

    /// Measures a device with graphs that take some 16 MiB and some milliseconds each.
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

        let rounded_rate = match device.grad_precision() {
            GradPrecision::F32 => float_rate,
            precision => {
                let mut rounded = Graph::new();
                let a = rounded.leaf("a", shape(&[ROWS, WIDTH])?, DType::F32)?;
                let w = rounded.weight("w", of, ty)?;
                let cast = rounded.cast(a, precision.dtype())?;
                let y = rounded.push(Op::MatMul { ta: false, tb: false }, &[cast, w], "y")?;
                madds / time(device, &rounded, y, &leaves)?
            }
        };

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
        let (float, block, rounded) = (float_rate, block_rate, rounded_rate);
        Ok(Rates { float, block, rounded, functions, bytes })
    }
}

/// The shortest time of a few runs, in seconds. Leaves are in the order they were made.
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
    for _ in 0..4 {
        let began = Instant::now();
        device.run(&plan, &bound, arena.as_mut(), Segment::default(), &())?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    Ok(best.max(1e-9))
}

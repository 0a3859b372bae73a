//! What a walk keeps in host memory between the graphs of its chunks.

use graph::Leaf;

use super::graphs::Kind;
use crate::{Error, Result, piece};

/// Something that a chunk computes and later chunks read.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Part {
    /// The leaf by which later chunks read it.
    pub(super) name: String,
    /// The leaf by which a chunk's graph is given the gradient that was sent back to it.
    pub(super) seed: String,
    /// The state of a recurrent layer, of which there is one and which the next chunk reads; else
    /// keys or values, which all later chunks read.
    pub(super) is_state: bool,
    /// Numbers of a chunk's keys or values, or of the state.
    pub(super) elements: usize,
    /// Bytes of the same as they are kept: keys and values in the cache's dtype.
    pub(super) bytes: usize,
    /// True when they move with the parameters, so that gradients are sent back to them.
    pub(super) moves: bool,
}

/// How much is kept.
#[derive(Copy, Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Extent {
    /// Chunks whose keys and values can be read.
    pub(super) kept: usize,
    /// Chunks that gradients can be sent back to.
    pub(super) sent: usize,
    /// Chunks from one kept state to the next; those between are computed again.
    pub(super) stride: usize,
    /// Kept states.
    pub(super) slots: usize,
}

/// The host memory of walks, which take turns.
#[derive(Default)]
pub(super) struct Memory {
    /// In a fixed order: keys and values layer by layer, then states. Empty before the first graph
    /// of a chunk is built.
    pub(super) parts: Vec<Part>,
    /// What is to be taken.
    pub(super) extent: Extent,
    taken: Extent,
    /// Per part that is no state, chunk after chunk; in 8-byte units, so that every element type
    /// is aligned.
    kept: Vec<Vec<u64>>,
    /// Gradients per part that moves: of keys and values chunk after chunk, of a state that of the
    /// next chunk's entry.
    sent: Vec<Vec<f32>>,
    /// The states before the chunk that runs next, where it has no slot.
    now: Vec<Vec<f32>>,
    /// Per slot, the states before a chunk.
    slots: Vec<Vec<Vec<f32>>>,
    /// What was sent to a chunk that none follows.
    zeros: Vec<f32>,
    /// A piece of a gradient on its way from an arena.
    buffer: Vec<f32>,
}

fn lost() -> Error {
    Error::Stopped("a part of a walk went missing".into())
}

impl Memory {
    /// Bytes of keys, values, their gradients, and all else that does not depend on how many
    /// states are kept.
    fn fixed(&self, extent: Extent) -> usize {
        if extent == Extent::default() {
            return 0;
        }
        let mut bytes = self.most_elements() * 4 + piece::BYTES;
        for part in &self.parts {
            bytes = bytes.saturating_add(match (part.is_state, part.moves) {
                (true, moves) => part.elements * 4 * (1 + usize::from(moves)),
                (false, moves) => {
                    let kept = part.bytes.saturating_mul(extent.kept).div_ceil(8).saturating_mul(8);
                    let sent = (part.elements * 4).saturating_mul(extent.sent);
                    kept.saturating_add(if moves { sent } else { 0 })
                }
            });
        }
        bytes
    }

    /// Bytes of the states of one slot.
    fn slot(&self) -> usize {
        self.parts.iter().filter(|p| p.is_state).map(|p| p.elements * 4).sum()
    }

    /// Numbers of the largest part of a chunk.
    fn most_elements(&self) -> usize {
        self.parts.iter().map(|p| p.elements).max().unwrap_or(0)
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.fixed(self.extent).saturating_add(self.slot().saturating_mul(self.extent.slots))
    }

    /// What walks of up to `chunks` chunks take, up to `trained` of them with gradients, reading
    /// up to `read`: as many states are kept as `budget` bytes allow (0 is no bound).
    ///
    /// # Errors
    /// When not even the rest fits.
    pub(super) fn fit(
        &self,
        (chunks, trained, read): (usize, usize, usize),
        rows: usize,
        budget: usize,
    ) -> Result<Extent> {
        let before = |n: usize| n.saturating_sub(1);
        let extent = Extent { kept: read, sent: before(trained), stride: 1, slots: 0 };
        let (fixed, slot) = (self.fixed(extent), self.slot());
        if budget > 0 && fixed > budget {
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            return Err(graph::Error::from(graph::Refusal {
                code: graph::Code::OverBudget,
                op: String::new(),
                node: String::new(),
                operand: None,
                device: None,
                reason: format!(
                    "`walk_host_budget` is {:.1} MiB, but a window of {} positions keeps {:.1} MiB \
                     of keys, values and their gradients in host memory, whatever the chunk and \
                     the horizon; raise it or use a shorter window",
                    mib(budget),
                    chunks.saturating_mul(rows),
                    mib(fixed)
                ),
            })
            .into());
        }
        if slot == 0 || trained < 2 {
            return Ok(extent);
        }
        let room = if budget == 0 { usize::MAX } else { (budget - fixed) / slot };
        // As many slots as there are multiples of the stride below the number of chunks.
        let fits = |stride: &usize| before(trained) / stride <= room;
        let stride = (1..=trained).find(fits).unwrap_or(trained);
        Ok(Extent { stride, slots: before(trained) / stride, ..extent })
    }

    /// Takes the memory, if it is not there yet.
    ///
    /// # Errors
    /// When memory is out.
    pub(super) fn reserve(&mut self) -> Result<()> {
        if self.taken == self.extent {
            return Ok(());
        }
        let Extent { kept, sent, slots, .. } = self.extent;
        let bytes = self.bytes();
        let out = |_| {
            let what = format!("{bytes} bytes of host memory for walks: out of memory");
            graph::Fault::new(graph::Code::OutOfMemory, "", what)
        };
        fn zeros<T: Clone + Default>(
            n: usize,
        ) -> std::result::Result<Vec<T>, std::collections::TryReserveError> {
            let mut list = Vec::new();
            list.try_reserve_exact(n)?;
            list.resize(n, T::default());
            Ok(list)
        }
        // Freed first, so that the peak never holds both.
        let parts = std::mem::take(&mut self.parts);
        *self = Memory { parts, extent: self.extent, ..Memory::default() };
        for part in &self.parts {
            let units = if part.is_state { 0 } else { (part.bytes * kept).div_ceil(8) };
            self.kept.push(zeros(units).map_err(out)?);
            let numbers = match (part.moves, part.is_state) {
                (false, _) => 0,
                (true, true) => part.elements,
                (true, false) => part.elements * sent,
            };
            self.sent.push(zeros(numbers).map_err(out)?);
        }
        let states = |memory: &Memory| {
            let sizes = memory.parts.iter().map(|p| if p.is_state { p.elements } else { 0 });
            sizes.map(zeros).collect::<std::result::Result<Vec<Vec<f32>>, _>>()
        };
        self.now = states(self).map_err(out)?;
        self.slots =
            (0..slots).map(|_| states(self)).collect::<std::result::Result<_, _>>().map_err(out)?;
        self.zeros = zeros(self.most_elements()).map_err(out)?;
        self.buffer = zeros(piece::NUMBERS).map_err(out)?;
        self.taken = self.extent;
        Ok(())
    }

    /// The slot of the states before a chunk, if they have one.
    fn slot_of(&self, chunk: usize) -> Option<usize> {
        let whole = self.extent.stride > 0 && chunk.is_multiple_of(self.extent.stride);
        let slot = (chunk.checked_div(self.extent.stride)?).checked_sub(1)?;
        (whole && slot < self.extent.slots).then_some(slot)
    }

    /// The chunk, up to `chunk`, that states can be computed from: the first, or one before which
    /// they are kept.
    pub(super) fn checkpoint(&self, chunk: usize) -> usize {
        let known = (0..=chunk).rev().find(|&c| self.slot_of(c).is_some());
        known.unwrap_or(0)
    }

    /// Where the state before a chunk is kept.
    pub(super) fn state_mut(&mut self, chunk: usize, part: usize) -> Result<&mut [f32]> {
        let states = match self.slot_of(chunk) {
            Some(slot) => self.slots.get_mut(slot),
            None => Some(&mut self.now),
        };
        let state = states.and_then(|states| states.get_mut(part));
        state.map(Vec::as_mut_slice).ok_or_else(lost)
    }

    /// A chunk's keys or values.
    pub(super) fn kept_mut(&mut self, chunk: usize, part: usize) -> Result<&mut [u8]> {
        let bytes = self.parts.get(part).map_or(0, |p| p.bytes);
        let all = self.kept.get_mut(part).map(|units| bytemuck::cast_slice_mut::<u64, u8>(units));
        all.and_then(|all| all.get_mut(chunk * bytes..(chunk + 1) * bytes)).ok_or_else(lost)
    }

    /// The gradients sent to a part so far, and a buffer to add to them from.
    pub(super) fn sent_mut(&mut self, part: usize) -> Result<(&mut [f32], &mut [f32])> {
        let sent = self.sent.get_mut(part).ok_or_else(lost)?;
        Ok((sent, &mut self.buffer))
    }

    /// Forgets what was sent, as a walk that stops gradients at its chunks' edges does.
    #[cfg(test)]
    pub(super) fn forget_sent(&mut self) {
        self.sent.iter_mut().for_each(|sent| sent.fill(0.0));
    }

    /// Bytes that are held.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        let floats = self.sent.iter().chain(&self.now).chain(self.slots.iter().flatten());
        let floats = floats.chain([&self.zeros, &self.buffer]);
        let units: usize = self.kept.iter().map(|k| k.capacity() * 8).sum();
        units + floats.map(|f| f.capacity() * 4).sum::<usize>()
    }

    /// What a chunk's graph is bound to here, always in the same order for a graph.
    pub(super) fn leaves(
        &self,
        chunk: usize,
        last: bool,
        kind: Kind,
    ) -> impl Iterator<Item = (&str, Leaf<'_>)> {
        let floats = |values| Leaf::Host(bytemuck::cast_slice::<f32, u8>(values));
        let earlier = kind.earlier.unwrap_or(0);
        let states = match self.slot_of(chunk) {
            Some(slot) => self.slots.get(slot),
            None => Some(&self.now),
        };
        self.parts.iter().enumerate().flat_map(move |(p, part)| {
            let read = match part.is_state {
                true => states.and_then(|s| s.get(p)).map(|s| floats(s)),
                false => {
                    let kept = self.kept.get(p).map(|k| bytemuck::cast_slice::<u64, u8>(k));
                    kept.and_then(|k| k.get(..earlier * part.bytes)).map(Leaf::Host)
                }
            };
            let at = if part.is_state { 0 } else { chunk * part.elements };
            let sent = match last {
                true => self.zeros.get(..part.elements),
                false => self.sent.get(p).and_then(|s| s.get(at..at + part.elements)),
            };
            let read = read.filter(|_| earlier > 0).map(|leaf| (part.name.as_str(), leaf));
            let sent = sent.filter(|_| kind.backward && part.moves);
            let sent = sent.map(|values| (part.seed.as_str(), floats(values)));
            read.into_iter().chain(sent)
        })
    }
}

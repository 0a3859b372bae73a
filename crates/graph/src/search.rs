//! Which op of a run first gave a number that is not finite.

use std::sync::Arc;

use crate::place::{Placed, Position, Workspace};
use crate::plan::Place;
use crate::{DType, Device, Fault, Leaf, Stop};

/// An op whose result is not finite.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Culprit {
    /// The op's name.
    pub op: &'static str,
    /// The node's name.
    pub node: Arc<str>,
}

impl std::fmt::Display for Culprit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at `{}`", self.op, self.node)
    }
}

/// How far a search has come. It runs a graph anew, tile by tile, and looks at each result before
/// anything is written over it.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// What runs next; `None` once all has run.
    next: Option<Position>,
    begun: bool,
    /// The part, step and element that is looked at next.
    looked: (usize, usize, usize),
}

/// Elements looked at between two looks at the clock.
const PIECE: usize = 1 << 16;

/// Stops at every edge.
struct Edge;

impl Stop for Edge {
    fn should_stop(&self) -> bool {
        true
    }
}

impl Placed {
    /// Goes on with a search until it has an answer or `stop` says so, which is `None`. The answer
    /// is the first op with a NaN or an infinity, if any. Devices, leaves and workspace are those of
    /// [`Placed::run`].
    ///
    /// # Errors
    /// As [`Placed::run`].
    pub fn search(
        &self,
        devices: &[&dyn Device],
        leaves: &[Leaf<'_>],
        workspace: &mut Workspace,
        search: &mut Search,
        stop: &dyn Stop,
    ) -> Result<Option<Option<Culprit>>, Fault> {
        let mut values = vec![0f32; PIECE];
        loop {
            if let Some(culprit) = self.look(workspace, search, &mut values)? {
                return Ok(Some(Some(culprit)));
            }
            if search.begun && search.next.is_none() && self.step(search.looked).is_none() {
                return Ok(Some(None));
            }
            if search.next.is_some() || !search.begun {
                let from = search.next.unwrap_or_default();
                if !self.is_behind(search) {
                    search.next = self.run(devices, leaves, workspace, from, &Edge)?;
                    search.begun = true;
                }
            }
            if stop.should_stop() {
                return Ok(None);
            }
        }
    }

    /// The step at a place, moving on over the ends of parts.
    fn step(&self, (part, step, _): (usize, usize, usize)) -> Option<(usize, usize)> {
        let mut at = (part, step);
        for (_, plan) in self.plans().skip(part) {
            if at.1 < plan.steps.len() {
                return Some(at);
            }
            at = (at.0 + 1, 0);
        }
        None
    }

    /// True when a step has run that has not been looked at.
    fn is_behind(&self, search: &Search) -> bool {
        let Some(at) = self.step(search.looked).filter(|_| search.begun) else { return false };
        search.next.is_none_or(|next| at < (next.part, next.segment.step))
    }

    /// Looks at a piece of the next result that is there.
    fn look(
        &self,
        workspace: &Workspace,
        search: &mut Search,
        values: &mut [f32],
    ) -> Result<Option<Culprit>, Fault> {
        if !self.is_behind(search) {
            return Ok(None);
        }
        let Some((part, index)) = self.step(search.looked) else { return Ok(None) };
        if (part, index) != (search.looked.0, search.looked.1) {
            search.looked = (part, index, 0);
        }
        let Some((device, plan)) = self.plans().nth(part) else { return Ok(None) };
        let Some(step) = plan.steps.get(index) else { return Ok(None) };
        let from = search.looked.2;
        let elements = step.out.arg.shape.elements();
        let count = elements.saturating_sub(from).min(values.len());
        let Place::Arena { start, .. } = step.out.place else {
            search.looked = (part, index + 1, 0);
            return Ok(None);
        };
        if step.out.arg.dtype == DType::F32 && count > 0 {
            let piece = values.get_mut(..count).unwrap_or(&mut []);
            let range = start + from * 4..start + (from + count) * 4;
            workspace.read(device, range, bytemuck::cast_slice_mut(piece))?;
            if piece.iter().any(|v| !v.is_finite()) {
                return Ok(Some(Culprit { op: step.op.name(), node: step.name.clone() }));
            }
        }
        search.looked = match from + count < elements && step.out.arg.dtype == DType::F32 {
            true => (part, index, from + count),
            false => (part, index + 1, 0),
        };
        Ok(None)
    }
}

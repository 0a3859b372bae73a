//! The order in which a plan's steps run.

use crate::*;

/// How many steps may run early together, and how many more may be pulled forward for them.
const GROUP: usize = 64;
const PULLED: usize = 16;

/// What the schedule knows of a node; nodes that are no step are done from the start.
#[derive(Clone, Default)]
struct State {
    bytes: usize,
    reads: Vec<NodeId>,
    readers: Vec<NodeId>,
    output: bool,
    pending: bool,
}

struct Schedule<'g> {
    graph: &'g Graph,
    states: Vec<State>,
}

/// Orders the steps, given in graph order with the values each reads: graph order, but where
/// only gradient nodes are left to read a value, they run at once if they take no more than
/// is freed by it. So the loss of one slice of rows is differentiated before the logits of the
/// next are computed.
pub(crate) fn schedule(
    graph: &Graph,
    steps: Vec<(NodeId, Vec<NodeId>)>,
    outputs: &[NodeId],
) -> Vec<NodeId> {
    let mut states = vec![State::default(); graph.len()];
    let ids: Vec<NodeId> = steps.iter().map(|s| s.0).collect();
    for (id, reads) in steps {
        for &b in &reads {
            if let Some(base) = states.get_mut(b.index()) {
                base.readers.push(id);
            }
        }
        let node = graph.node(id);
        if let Some(state) = states.get_mut(id.index()) {
            state.bytes = node.shape.bytes(node.dtype).unwrap_or(0);
            state.reads = reads;
            state.output = outputs.contains(&id);
            state.pending = true;
        }
    }
    let mut schedule = Schedule { graph, states };
    let mut order = Vec::with_capacity(ids.len());
    let mut stack: Vec<NodeId> = Vec::new();
    for id in ids {
        stack.push(id);
        while let Some(id) = stack.pop() {
            if !schedule.pending(id) {
                continue;
            }
            order.push(id);
            if let Some(state) = schedule.states.get_mut(id.index()) {
                state.pending = false;
            }
            for value in schedule.affected(id) {
                if let Some(group) = schedule.early(value) {
                    stack.extend(group.into_iter().rev());
                }
            }
        }
    }
    order
}

impl Schedule<'_> {
    fn pending(&self, id: NodeId) -> bool {
        self.states.get(id.index()).is_some_and(|s| s.pending)
    }

    fn bytes(&self, id: NodeId) -> usize {
        self.states.get(id.index()).map_or(0, |s| s.bytes)
    }

    fn reads(&self, id: NodeId) -> &[NodeId] {
        self.states.get(id.index()).map_or(&[], |s| &s.reads)
    }

    /// The steps that have yet to read a value.
    fn waiting(&self, value: NodeId) -> impl Iterator<Item = NodeId> {
        let readers = self.states.get(value.index()).map_or(&[][..], |s| &s.readers);
        readers.iter().copied().filter(|&r| self.pending(r))
    }

    fn is_gradient(&self, id: NodeId) -> bool {
        self.graph.node(id).pass == Pass::Backward
    }

    /// The values whose last readers a step may have made ready.
    fn affected(&self, id: NodeId) -> Vec<NodeId> {
        let mut values = vec![id];
        values.extend(self.reads(id));
        for r in self.waiting(id).filter(|&r| self.is_gradient(r)) {
            values.extend(self.reads(r));
        }
        values.sort();
        values.dedup();
        values.retain(|&v| !self.pending(v));
        values
    }

    /// All that is left to read a value, and the little it still waits for, in graph order, if
    /// running it now does not raise the memory in use.
    fn early(&self, value: NodeId) -> Option<Vec<NodeId>> {
        let mut steps: Vec<NodeId> = Vec::new();
        for r in self.waiting(value) {
            if !self.is_gradient(r) || steps.len() == GROUP {
                return None;
            }
            steps.push(r);
        }
        let group = steps.len();
        let mut values: Vec<NodeId> = Vec::new();
        let mut next = 0;
        while let Some(&step) = steps.get(next) {
            next += 1;
            for &b in self.reads(step) {
                if !self.pending(b) {
                    values.push(b);
                } else if !steps.contains(&b) {
                    // A recomputed value must not be there before its layer's turn.
                    if steps.len() == group + PULLED || self.graph.node(b).pass == Pass::Again {
                        return None;
                    }
                    steps.push(b);
                }
            }
        }
        values.sort();
        values.dedup();
        let is_last = |v: NodeId| self.waiting(v).all(|r| steps.contains(&r));
        let is_output = |v: NodeId| self.states.get(v.index()).is_some_and(|s| s.output);
        let freed: usize =
            values.iter().filter(|&&v| !is_output(v) && is_last(v)).map(|&v| self.bytes(v)).sum();
        let sum = |steps: &[NodeId]| steps.iter().map(|&s| self.bytes(s)).sum::<usize>();
        let (group, pulled) = steps.split_at(group);
        let gains = !group.is_empty() && sum(group) <= freed && sum(pulled) <= freed / 16;
        steps.sort();
        gains.then_some(steps)
    }
}

//! Which pages hold which tokens: a tree whose every node is one page after its parent's.
//!
//! A node is found by its parent and its page's tokens, compared one by one; a hash only finds
//! the place. The roots are the adapter generations, so prefixes of different adapters never
//! meet.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use super::PAGE;
use crate::AdapterId;

/// The number of a node; never used again.
pub(super) type NodeId = u64;

/// What a page follows.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Parent {
    /// Nothing: it is the first of sequences that use this adapter.
    Root(Option<AdapterId>),
    /// Another page.
    Node(NodeId),
}

/// A full page that sequences can begin with.
pub(super) struct Node {
    parent: Parent,
    adapter: Option<AdapterId>,
    tokens: [u32; PAGE],
    pub(super) page: u32,
    /// The slot with the recurrent state after this page.
    pub(super) state: Option<u32>,
    /// True when that state has been reused.
    pub(super) reused: bool,
    children: usize,
    used: u64,
}

impl Node {
    /// True when no page follows it.
    pub(super) fn is_last(&self) -> bool {
        self.children == 0
    }
}

/// All pages that can be reused.
#[derive(Default)]
pub(super) struct Index {
    nodes: HashMap<NodeId, Node>,
    children: HashMap<(Parent, [u32; PAGE]), NodeId>,
    /// Nodes by their last use; of equal ones the deeper, which is the younger, comes first.
    by_age: BTreeSet<(u64, Reverse<NodeId>)>,
    next: NodeId,
    clock: u64,
}

impl Index {
    pub(super) fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(&id)
    }

    /// Every node, in no order.
    #[cfg(test)]
    pub(super) fn all(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// The node of a page with these tokens after another.
    pub(super) fn child(&self, parent: Parent, tokens: [u32; PAGE]) -> Option<NodeId> {
        self.children.get(&(parent, tokens)).copied()
    }

    /// The nodes of the longest known beginning of some tokens, of whole pages.
    pub(super) fn find(&self, adapter: Option<AdapterId>, tokens: &[u32]) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut parent = Parent::Root(adapter);
        for page in tokens.as_chunks::<PAGE>().0 {
            let Some(id) = self.child(parent, *page) else { break };
            found.push(id);
            parent = Parent::Node(id);
        }
        found
    }

    /// A new node; there must be none with the same parent and tokens.
    pub(super) fn insert(&mut self, parent: Parent, tokens: [u32; PAGE], page: u32) -> NodeId {
        let id = self.next;
        self.next += 1;
        self.clock += 1;
        let used = self.clock;
        let adapter = match parent {
            Parent::Root(adapter) => adapter,
            Parent::Node(above) => self.nodes.get_mut(&above).and_then(|above| {
                above.children += 1;
                above.adapter
            }),
        };
        let (state, reused, children) = (None, false, 0);
        let node = Node { parent, adapter, tokens, page, state, reused, children, used };
        self.nodes.insert(id, node);
        self.children.insert((parent, tokens), id);
        self.by_age.insert((used, Reverse(id)));
        id
    }

    /// These nodes are used now.
    pub(super) fn touch(&mut self, ids: &[NodeId]) {
        self.clock += 1;
        for id in ids {
            let Some(node) = self.nodes.get_mut(id) else { continue };
            self.by_age.remove(&(node.used, Reverse(*id)));
            node.used = self.clock;
            self.by_age.insert((node.used, Reverse(*id)));
        }
    }

    /// The node that was not used for the longest time, of those that `wanted` accepts.
    pub(super) fn oldest(&self, wanted: impl Fn(&Node) -> bool) -> Option<NodeId> {
        let mut ids = self.by_age.iter().map(|(_, Reverse(id))| *id);
        ids.find(|id| self.nodes.get(id).is_some_and(&wanted))
    }

    /// Takes a node out.
    pub(super) fn remove(&mut self, id: NodeId) -> Option<Node> {
        let node = self.nodes.remove(&id)?;
        self.children.remove(&(node.parent, node.tokens));
        self.by_age.remove(&(node.used, Reverse(id)));
        if let Parent::Node(above) = node.parent
            && let Some(above) = self.nodes.get_mut(&above)
        {
            above.children -= 1;
        }
        Some(node)
    }

    /// Every node of sequences that use an adapter, later ones before those they follow.
    pub(super) fn of_adapter(&self, adapter: AdapterId) -> Vec<NodeId> {
        let of = |(id, node): (&NodeId, &Node)| (node.adapter == Some(adapter)).then_some(*id);
        let mut found: Vec<NodeId> = self.nodes.iter().filter_map(of).collect();
        found.sort_unstable_by_key(|&id| Reverse(id));
        found
    }
}

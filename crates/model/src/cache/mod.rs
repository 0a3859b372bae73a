//! The paged cache of keys and values, recurrent states, and the prefixes that are reused.
//!
//! Every layer with attention has one pool of pages for keys and one for values, in host memory,
//! in the cache's dtype; a page holds [`PAGE`] positions. A sequence has the same page numbers in
//! every layer. Full pages stay known by the adapter and tokens they are of, also after the
//! sequence is closed, until their room is needed: [`Cache::open_prefix`] begins with as many of
//! them as fit its tokens. Sequences share such pages and write to none of them.
//!
//! A recurrent layer has slots, each with the state of one sequence (f32). A state is of one
//! position, so a prefix can be reused up to where one was kept: at the last page edge a sequence
//! has passed, at the last one of a prompt, and where a prompt left another one. A slot that is
//! kept is never written: its sequence goes on in another.

mod index;
mod pool;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)] // helpers of tests may panic
mod tests;

use std::collections::BTreeMap;

use graph::{DType, Leaf, Shape};

use crate::{AdapterId, Error, Geometry, PrefixShape, Result};
use index::{Index, NodeId, Parent};
use pool::{Places, Pool, pool_bytes};

/// Positions per page.
pub const PAGE: usize = 32;

/// A sequence in a cache; never used again after it is closed.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SeqId(u64);

#[derive(Default)]
struct Sequence {
    /// What it holds, one token per position.
    tokens: Vec<u32>,
    /// The adapter of its rows, once it has any.
    adapter: Option<Option<AdapterId>>,
    /// True when rows used several adapters: no page from there on is reused.
    mixed: bool,
    pages: Vec<u32>,
    /// The nodes of its first pages, which others may share.
    nodes: Vec<NodeId>,
    /// The slot with the state after its last position.
    state: Option<u32>,
    /// The slot that the next run's state goes to.
    next: Option<u32>,
    /// Positions whose state is to be kept, ascending.
    keep: Vec<usize>,
    /// The node and slot of a state that is given up when a later one is kept.
    trail: Option<(NodeId, u32)>,
}

impl Sequence {
    fn len(&self) -> usize {
        self.tokens.len()
    }
}

/// Keys, values and states of many sequences.
pub struct Cache {
    dtype: DType,
    pages: Places,
    page_count: usize,
    slots: Places,
    slot_count: usize,
    sequences: BTreeMap<SeqId, Sequence>,
    next: u64,
    index: Index,
    /// Per layer with attention: keys, values.
    layers: Vec<(Pool, Pool)>,
    /// Per state of a sequence: one row per slot.
    states: Vec<Pool>,
}

/// Bytes of one position's keys and values in a layer.
fn row_bytes(geometry: &Geometry, dtype: DType) -> Result<(usize, usize)> {
    let row = |width: usize| {
        let shape = Shape::new(&[geometry.kv_heads, width])?;
        shape.bytes(dtype).ok_or_else(|| {
            Error::new(format!(
                "a {dtype} cache needs head widths in whole blocks, and this model's is {width}; \
                 use an f16 cache"
            ))
        })
    };
    Ok((row(geometry.key_width)?, row(geometry.value_width)?))
}

fn state_bytes(state: &Shape) -> Option<usize> {
    state.bytes(DType::F32)
}

impl Cache {
    /// A cache for `positions` positions in all (rounded up to whole pages), and for models with
    /// recurrent layers `slots` states.
    ///
    /// # Errors
    /// When the head widths are not whole blocks of `dtype`, there is no slot though the model
    /// needs one, or memory is out.
    pub fn new(geometry: &Geometry, dtype: DType, positions: usize, slots: usize) -> Result<Cache> {
        let count = |n: usize| u32::try_from(n).ok().filter(|&n| n < i32::MAX as u32);
        let page_count = positions.div_ceil(PAGE).max(1);
        let too_many = || Error::new(format!("a cache of {positions} positions is too large"));
        let rows = page_count.checked_mul(PAGE).ok_or_else(too_many)?;
        let pages = Places::new(count(page_count).ok_or_else(too_many)?);
        let slot_count = if geometry.states.is_empty() { 0 } else { slots };
        if slot_count == 0 && !geometry.states.is_empty() {
            return Err(Error::new(
                "a cache without slots for states; this model's recurrent layers need one per \
                 sequence",
            ));
        }
        let too_many = || Error::new(format!("a cache of {slots} states is too large"));
        let (k, v) = row_bytes(geometry, dtype)?;
        let layers = geometry.attention_layers.iter();
        let state = |s: &Shape| Pool::new(slot_count, state_bytes(s).ok_or_else(too_many)?);
        Ok(Cache {
            dtype,
            pages,
            page_count,
            slots: Places::new(count(slot_count).ok_or_else(too_many)?),
            slot_count,
            sequences: BTreeMap::new(),
            next: 0,
            index: Index::default(),
            layers: layers
                .map(|_| Ok((Pool::new(rows, k)?, Pool::new(rows, v)?)))
                .collect::<Result<_>>()?,
            states: geometry.states.iter().map(state).collect::<Result<_>>()?,
        })
    }

    /// Bytes that [`Cache::new`] takes with these arguments.
    pub fn bytes_for(
        geometry: &Geometry,
        dtype: DType,
        positions: usize,
        slots: usize,
    ) -> Option<usize> {
        let rows = positions.div_ceil(PAGE).max(1).checked_mul(PAGE)?;
        let (k, v) = row_bytes(geometry, dtype).ok()?;
        let layer = pool_bytes(rows, k)?.checked_add(pool_bytes(rows, v)?)?;
        let pages = layer.checked_mul(geometry.attention_layers.len())?;
        let states = geometry.states.iter().map(|s| pool_bytes(slots, state_bytes(s)?));
        states.sum::<Option<usize>>()?.checked_add(pages)
    }

    /// Element type of the pages.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of all pools.
    pub fn bytes(&self) -> usize {
        let pages: usize = self.layers.iter().map(|(k, v)| k.size() + v.size()).sum();
        pages + self.states.iter().map(Pool::size).sum::<usize>()
    }

    /// Pages that a sequence can get: those that are free or kept for reuse alone.
    pub fn free_pages(&self) -> usize {
        self.pages.available()
    }

    /// Slots of state that a sequence can get, as [`Cache::free_pages`] counts.
    pub fn free_slots(&self) -> usize {
        self.slots.available()
    }

    /// What a graph must know of it, for sequences of up to `table` pages.
    pub fn prefix_shape(&self, table: usize) -> PrefixShape {
        PrefixShape { pages: self.page_count, page: PAGE, table }
    }

    /// How many slots of state there are; 0 for models without recurrent layers.
    pub fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// A new, empty sequence, which reuses nothing. Its full pages can be reused.
    pub fn open(&mut self) -> SeqId {
        let id = SeqId(self.next);
        self.next += 1;
        self.sequences.insert(id, Sequence::default());
        id
    }

    /// A new sequence that is to run these tokens with an adapter. It begins with what other
    /// sequences have left of them, whole pages and never all of them, since the last token's
    /// logits are wanted. Also gives how many tokens it holds.
    pub fn open_prefix(&mut self, tokens: &[u32], adapter: Option<AdapterId>) -> (SeqId, usize) {
        let id = self.open();
        let prompt = tokens.len().saturating_sub(1) / PAGE;
        let (known, _) = tokens.split_at(prompt * PAGE);
        let mut nodes = self.index.find(adapter, known);
        self.index.touch(&nodes);
        let matched = nodes.len();
        let mut state = None;
        if self.slot_count > 0 {
            let slot = |id: &NodeId| self.index.get(*id).and_then(|node| node.state);
            let kept = nodes.iter().rposition(|id| slot(id).is_some());
            nodes.truncate(kept.map_or(0, |i| i + 1));
            state = nodes.last().and_then(slot);
        }
        if let Some(node) = nodes.last().and_then(|&id| self.index.get_mut(id)) {
            node.reused = true;
        }
        let held = nodes.len() * PAGE;
        let pages: Vec<u32> =
            nodes.iter().filter_map(|&id| self.index.get(id)).map(|node| node.page).collect();
        pages.iter().for_each(|&page| self.pages.share(page));
        state.iter().for_each(|&slot| self.slots.share(slot));
        if let Some(s) = self.sequences.get_mut(&id) {
            s.tokens.extend(tokens.iter().take(held));
            s.adapter = Some(adapter);
            s.pages = pages;
            s.nodes = nodes;
            s.state = state;
            if self.slot_count > 0 {
                s.keep = [matched, prompt].map(|page| page * PAGE).into();
                s.keep.retain(|&at| at > held);
                s.keep.dedup();
            }
        }
        (id, held)
    }

    /// Closes a sequence. Its full pages stay for reuse until their room is needed.
    pub fn close(&mut self, id: SeqId) {
        let Some(s) = self.sequences.remove(&id) else { return };
        self.index.touch(&s.nodes);
        s.pages.iter().for_each(|&page| self.pages.release(page));
        s.state.iter().for_each(|&slot| self.slots.release(slot));
        s.next.iter().filter(|_| s.next != s.state).for_each(|&slot| self.slots.release(slot));
    }

    /// Positions a sequence holds.
    pub fn len(&self, id: SeqId) -> usize {
        self.sequences.get(&id).map_or(0, Sequence::len)
    }

    /// True when a sequence holds nothing.
    pub fn is_empty(&self, id: SeqId) -> bool {
        self.len(id) == 0
    }

    /// The tokens a sequence holds.
    pub fn tokens(&self, id: SeqId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |s| &s.tokens)
    }

    /// Drops every position from `len` on, and gives how many the sequence then holds: fewer with
    /// recurrent layers, whose states are only known at some positions.
    pub fn truncate(&mut self, id: SeqId, len: usize) -> usize {
        let Some(s) = self.sequences.get_mut(&id) else { return 0 };
        if len >= s.len() {
            return s.len();
        }
        s.mixed &= len > s.nodes.len() * PAGE;
        let mut keep = len;
        let mut state = None;
        if self.slot_count > 0 {
            let nodes = s.nodes.iter().take(len / PAGE);
            let slots: Vec<Option<u32>> =
                nodes.map(|&id| self.index.get(id).and_then(|node| node.state)).collect();
            let known = slots.iter().rposition(Option::is_some);
            keep = known.map_or(0, |i| (i + 1) * PAGE);
            state = slots.get(known.unwrap_or(0)).copied().flatten();
            state.iter().for_each(|&slot| self.slots.share(slot));
            let next = s.next.take().filter(|_| s.next != s.state);
            [s.state, next].iter().flatten().for_each(|&slot| self.slots.release(slot));
        }
        s.state = state;
        s.tokens.truncate(keep);
        s.nodes.truncate(keep / PAGE);
        s.trail = s.trail.filter(|(trail, _)| s.nodes.contains(trail));
        while s.pages.len() > keep.div_ceil(PAGE) {
            s.pages.pop().iter().for_each(|&page| self.pages.release(page));
        }
        if keep == 0 {
            s.adapter = None;
        }
        keep
    }

    /// The pages of a sequence, in order.
    pub(crate) fn table(&self, id: SeqId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |s| &s.pages)
    }

    /// Pages and slots that a sequence lacks for `rows` more positions.
    fn lacks(&self, s: &Sequence, rows: usize) -> (usize, usize) {
        let missing = (s.len() + rows).div_ceil(PAGE).saturating_sub(s.pages.len());
        let copied = usize::from(rows > 0 && self.written(s).is_some());
        let slot = match (s.next, s.state) {
            _ if self.slot_count == 0 => 0,
            (Some(_), _) => 0,
            (None, None) => 1,
            // A state that only this sequence holds need not be kept.
            (None, Some(slot)) => usize::from(self.slots.users(slot) > 1),
        };
        (missing + copied, slot)
    }

    /// The page that the next position goes to, if others read it.
    fn written(&self, s: &Sequence) -> Option<u32> {
        let page = s.pages.get(s.len() / PAGE).copied();
        page.filter(|&page| !s.len().is_multiple_of(PAGE) && self.pages.is_shared(page))
    }

    /// Says that these sequences can all have so many more positions, each standing once, or
    /// that the cache is full.
    ///
    /// # Errors
    /// [`Error::Full`]; or a sequence is not open.
    pub fn check_room(&self, wanted: &[(SeqId, usize)]) -> Result<()> {
        let (mut pages, mut slots) = (0, 0);
        for (id, rows) in wanted {
            let Some(s) = self.sequences.get(id) else {
                return Err(Error::new("the sequence is not open in this cache"));
            };
            let (p, s) = self.lacks(s, *rows);
            (pages, slots) = (pages + p, slots + s);
        }
        for (what, needed, free) in [
            ("pages of 32 positions", pages, self.pages.available()),
            ("slots of recurrent state", slots, self.slots.available()),
        ] {
            if needed > free {
                return Err(Error::Full { what, needed, free });
            }
        }
        Ok(())
    }

    /// Takes pages, and slots for states, for so many more positions of sequences.
    ///
    /// # Errors
    /// As [`Cache::check_room`]; nothing is taken then.
    pub(crate) fn reserve(&mut self, wanted: &[(SeqId, usize)]) -> Result<()> {
        self.check_room(wanted)?;
        for &(id, rows) in wanted {
            let Some(s) = self.sequences.get(&id) else { continue };
            let pages = self.lacks(s, rows).0;
            let shared = self.written(s).filter(|_| rows > 0);
            for _ in 0..pages {
                let Some(page) = self.take_page() else { break };
                let Some(s) = self.sequences.get_mut(&id) else { break };
                s.pages.push(page);
            }
            if let Some(from) = shared {
                self.own_page(id, from);
            }
        }
        // Those that cannot do without a slot come before those that would rather keep theirs.
        for must in [true, false] {
            for &(id, rows) in wanted {
                let Some(s) = self.sequences.get(&id).filter(|_| rows > 0) else { continue };
                if must == (self.lacks(s, rows).1 > 0) {
                    self.ready(id)?;
                }
            }
        }
        Ok(())
    }

    /// Puts a copy, which is the last page it took, in the place of a page that others read.
    fn own_page(&mut self, id: SeqId, from: u32) {
        let Some(s) = self.sequences.get_mut(&id) else { return };
        let at = s.len() / PAGE;
        let Some(to) = s.pages.pop() else { return };
        if let Some(page) = s.pages.get_mut(at) {
            *page = to;
        }
        self.pages.release(from);
        for (k, v) in &mut self.layers {
            for pool in [k, v] {
                pool.copy(from as usize * PAGE, to as usize * PAGE, PAGE);
            }
        }
    }

    /// A free page, if need be the one that was kept for reuse without use for longest.
    fn take_page(&mut self) -> Option<u32> {
        if let Some(page) = self.pages.take() {
            return Some(page);
        }
        let oldest = self.index.oldest(|node| node.is_last() && self.pages.is_idle(node.page))?;
        self.drop_node(oldest);
        self.pages.take()
    }

    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.slots.take() {
            return Some(slot);
        }
        let idle = |slot: u32| self.slots.is_idle(slot);
        let oldest = self.index.oldest(|node| node.state.is_some_and(idle))?;
        self.drop_state(oldest);
        self.slots.take()
    }

    fn drop_node(&mut self, id: NodeId) {
        self.drop_state(id);
        if let Some(node) = self.index.remove(id) {
            self.pages.forget(node.page);
        }
    }

    fn drop_state(&mut self, id: NodeId) {
        if let Some(slot) = self.index.get_mut(id).and_then(|node| node.state.take()) {
            self.slots.forget(slot);
        }
    }

    /// Makes sure that the state after the next run has a slot that nobody else reads.
    ///
    /// # Errors
    /// [`Error::Full`] when there is none.
    pub(crate) fn ready(&mut self, id: SeqId) -> Result<()> {
        let Some(s) = self.sequences.get(&id).filter(|s| self.slot_count > 0 && s.next.is_none())
        else {
            return Ok(());
        };
        let full = || Error::Full { what: "slots of recurrent state", needed: 1, free: 0 };
        let state = s.state;
        let slot = match state {
            Some(slot) if !self.slots.is_shared(slot) => slot,
            Some(slot) => match self.take_slot() {
                Some(free) => free,
                None if self.slots.users(slot) == 1 => {
                    // Better to go on than to keep it.
                    let held = self.sequences.get(&id).map_or(&[][..], |s| &s.nodes);
                    let keeps = |id: &&NodeId| {
                        self.index.get(**id).is_some_and(|node| node.state == Some(slot))
                    };
                    let keeper = held.iter().rev().find(keeps).copied();
                    self.drop_state(keeper.ok_or_else(full)?);
                    slot
                }
                None => return Err(full()),
            },
            None => {
                let slot = self.take_slot().ok_or_else(full)?;
                for pool in &mut self.states {
                    pool.rows_mut(slot as usize, 1).fill(0);
                }
                slot
            }
        };
        if let Some(s) = self.sequences.get_mut(&id) {
            s.next = Some(slot);
            s.state.get_or_insert(slot);
        }
        Ok(())
    }

    /// How many of `rows` more rows may go through one run: the state after the last of them is
    /// to be kept, or `rows`.
    pub(crate) fn until_kept(&self, id: SeqId, rows: usize) -> usize {
        let Some(s) = self.sequences.get(&id) else { return rows };
        let next = s.keep.iter().find(|&&at| at > s.len());
        next.map_or(rows, |at| rows.min(at - s.len()))
    }

    /// Where `rows` new positions of a sequence go: `(first pool row, count)` in order.
    pub(crate) fn runs(&self, id: SeqId, rows: usize) -> Vec<(usize, usize)> {
        let Some(s) = self.sequences.get(&id) else { return Vec::new() };
        let mut runs = Vec::new();
        let (mut at, end) = (s.len(), s.len() + rows);
        while at < end {
            let Some(&page) = s.pages.get(at / PAGE) else { break };
            let count = (PAGE - at % PAGE).min(end - at);
            runs.push((page as usize * PAGE + at % PAGE, count));
            at += count;
        }
        runs
    }

    /// The pool rows of a layer, to be written; `values` picks the value pool.
    pub(crate) fn rows_mut(
        &mut self,
        layer: usize,
        values: bool,
        row: usize,
        rows: usize,
    ) -> &mut [u8] {
        match self.layers.get_mut(layer) {
            Some((_, v)) if values => v.rows_mut(row, rows),
            Some((k, _)) => k.rows_mut(row, rows),
            None => &mut [],
        }
    }

    /// Bytes of one position in a layer's key or value pool.
    pub(crate) fn row_bytes(&self, layer: usize, values: bool) -> usize {
        let pools = self.layers.get(layer);
        pools.map_or(0, |(k, v)| if values { v.row_bytes } else { k.row_bytes })
    }

    /// The slot with a sequence's state; 0 where it has none.
    pub(crate) fn slot(&self, id: SeqId) -> u32 {
        self.sequences.get(&id).and_then(|s| s.state).unwrap_or(0)
    }

    /// The bytes that a sequence's state after the next run goes to.
    pub(crate) fn next_state(&mut self, id: SeqId, state: usize) -> &mut [u8] {
        let slot = self.sequences.get(&id).and_then(|s| s.next);
        match (slot, self.states.get_mut(state)) {
            (Some(slot), Some(pool)) => pool.rows_mut(slot as usize, 1),
            _ => &mut [],
        }
    }

    /// Counts tokens, whose keys, values and states have been written, to a sequence, and makes
    /// its pages that are full now known for reuse.
    pub(crate) fn advance(&mut self, id: SeqId, tokens: &[u32], adapter: Option<AdapterId>) {
        let Some(s) = self.sequences.get_mut(&id) else { return };
        s.mixed |= *s.adapter.get_or_insert(adapter) != adapter;
        s.tokens.extend(tokens);
        if let Some(next) = s.next.take()
            && s.state != Some(next)
        {
            s.state.iter().for_each(|&slot| self.slots.release(slot));
            s.state = Some(next);
        }
        let full = s.tokens.as_chunks::<PAGE>().0;
        while !s.mixed
            && let Some(page) = full.get(s.nodes.len())
            && let Some(own) = s.pages.get_mut(s.nodes.len())
        {
            let parent = s.nodes.last().map_or(Parent::Root(adapter), |&id| Parent::Node(id));
            let node = match self.index.child(parent, *page) {
                Some(node) => {
                    // The same tokens give the same bytes: one copy is enough.
                    if let Some(known) = self.index.get(node) {
                        self.pages.share(known.page);
                        self.pages.release(*own);
                        *own = known.page;
                    }
                    node
                }
                None => {
                    self.pages.keep(*own);
                    self.index.insert(parent, *page, *own)
                }
            };
            s.nodes.push(node);
        }
        self.keep_state(id);
    }

    /// Keeps the state of a sequence that has come to a page's edge, and gives up the one it kept
    /// before, unless that was asked for or has been reused.
    fn keep_state(&mut self, id: SeqId) {
        let Some(s) = self.sequences.get_mut(&id) else { return };
        let at_edge = s.len() == s.nodes.len() * PAGE;
        let (Some(&last), Some(slot), true) = (s.nodes.last(), s.state, at_edge) else { return };
        let wanted = s.keep.contains(&s.len());
        let trail = s.trail.take();
        let Some(node) = self.index.get_mut(last) else { return };
        if node.state.is_none() {
            node.state = Some(slot);
            self.slots.keep(slot);
            s.trail = (!wanted).then_some((last, slot));
        }
        if let Some((trail, slot)) = trail
            && let Some(node) = self.index.get(trail)
            && node.state == Some(slot)
            && !node.reused
        {
            self.drop_state(trail);
        }
    }

    /// Gives up what is kept for reuse under an adapter, but for what sequences still hold.
    pub(crate) fn forget(&mut self, adapter: AdapterId) {
        for id in self.index.of_adapter(adapter) {
            let node = self.index.get(id);
            if node.is_some_and(|node| node.is_last() && self.pages.is_idle(node.page)) {
                self.drop_node(id);
            }
        }
    }

    /// What a cache leaf of a graph is bound to.
    pub(crate) fn leaf(&self, layer: usize, values: bool) -> Leaf<'_> {
        let pools = self.layers.get(layer);
        let pool = pools.map(|(k, v)| if values { v } else { k });
        Leaf::Host(pool.map_or(&[], |pool| pool.rows(0, self.page_count * PAGE)))
    }

    /// What a state's leaf is bound to: one slot, or all.
    pub(crate) fn state_leaf(&self, state: usize, slot: Option<u32>) -> Leaf<'_> {
        let pool = self.states.get(state);
        Leaf::Host(pool.map_or(&[], |pool| match slot {
            Some(slot) => pool.rows(slot as usize, 1),
            None => pool.rows(0, self.slot_count),
        }))
    }
}

//! Cases of the recurrences.
//!
//! Decays, steps and keys are such that states neither vanish nor grow: keys of length about 1,
//! log decays and steps of one sign.

use graph::{GatedDeltaAttrs, Invalid, KeyHeads, NodeId, Op, SsmConvOperand, SsmConvStateOperand};

use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

type Seqs = &'static [[i32; 3]];

/// How rows are divided among sequences.
#[derive(Copy, Clone)]
struct Packing {
    name: &'static str,
    rows: usize,
    seqs: Seqs,
}

const ONE: Packing = Packing { name: "one sequence", rows: 7, seqs: &[[0, 7, 0]] };
/// Longer than a few segments between checkpoints.
const LONG: Packing = Packing { name: "a long sequence", rows: 41, seqs: &[[0, 41, 9]] };
/// Out of order, of lengths that are and are not squares, one empty and beyond all rows, rows of
/// none in front, between and behind.
const PACKED: Packing = Packing {
    name: "packed",
    rows: 24,
    seqs: &[[9, 5, 0], [1, 7, 3], [90, 0, 0], [16, 1, 0], [17, 4, 2]],
};
const DECODE: Packing =
    Packing { name: "one row each", rows: 4, seqs: &[[1, 1, 5], [0, 1, 2], [3, 1, 0]] };
const SHORT: Packing = Packing { name: "short ones", rows: 5, seqs: &[[0, 2, 0], [2, 3, 0]] };
const ALL: [Packing; 5] = [ONE, LONG, PACKED, DECODE, SHORT];

/// Sequences that are not where they can be, of 7 rows.
const OUTSIDE: [(&str, Seqs); 5] = [
    ("rows beyond the last", &[[0, 3, 0], [4, 4, 0]]),
    ("rows before the first", &[[-1, 3, 0]]),
    ("a negative count", &[[4, -1, 0]]),
    ("sums that overflow", &[[i32::MAX, i32::MAX, 0]]),
    ("rows of two sequences", &[[0, 4, 0], [5, 2, 0], [3, 2, 0]]),
];

fn outside(seqs: Seqs) -> Packing {
    Packing { name: "outside", rows: 7, seqs }
}

impl Packing {
    fn seqs(&self, g: &mut CaseGraph) -> Made {
        g.ints("seqs", &[self.seqs.len(), 3], self.seqs.as_flattened())
    }

    fn count(&self) -> usize {
        self.seqs.len()
    }

    /// Steps and decays are divided by this, so that what enters a long sequence is still felt
    /// at its end.
    fn slowness(&self) -> f64 {
        if self.rows > 30 { 8.0 } else { 1.0 }
    }
}

/// What of an op's result is the output.
#[derive(Copy, Clone, PartialEq)]
enum Part {
    /// All of it, as it is.
    Flat,
    Outputs,
    ExitStates,
}

/// Asks nothing of leaves that the output does not depend on, or is constant in.
fn ask_nothing(g: &mut CaseGraph, names: &[&str]) {
    for leaf in names.iter().filter_map(|name| g.graph.find_leaf(name)).collect::<Vec<_>>() {
        g.expect(leaf, Expected::Nothing);
    }
}

fn refuse_all(g: &mut CaseGraph) {
    let refused = g.refused();
    g.expect_all(refused);
}

// ---- short convolution ------------------------------------------------------------------------

#[derive(Copy, Clone)]
struct Conv {
    packing: Packing,
    channels: usize,
    taps: usize,
    view: View,
}

struct ConvOperands {
    x: NodeId,
    w: NodeId,
    state: NodeId,
    seqs: NodeId,
}

impl Conv {
    fn operands(&self, g: &mut CaseGraph) -> Result<ConvOperands, Invalid> {
        let Conv { packing, channels, taps, view } = *self;
        // What is repeated cancels everywhere at once where it cancels at all.
        let fill = match view {
            View::Repeated | View::RepeatedColumns => Fill::POSITIVE,
            _ => Fill::Signed,
        };
        Ok(ConvOperands {
            x: g.viewed("x", &[packing.rows, channels], view, fill)?,
            w: g.viewed("w", &[channels, taps], view, fill)?,
            state: g.viewed("state", &[packing.count(), taps - 1, channels], view, fill)?,
            seqs: packing.seqs(g)?,
        })
    }

    /// True when some of the entry states is left in the exit states.
    fn keeps(&self) -> bool {
        self.packing.seqs.iter().any(|s| (s[1] as usize) < self.taps - 1)
    }

    fn conv(&self, g: &mut CaseGraph) -> Made {
        let o = self.operands(g)?;
        if self.taps == 1 {
            ask_nothing(g, &["state"]);
        }
        g.graph.ssm_conv(o.x, o.w, o.state, o.seqs, "y")
    }

    fn back(&self, g: &mut CaseGraph, wrt: SsmConvOperand) -> Made {
        let o = self.operands(g)?;
        let dims = [self.packing.rows, self.channels];
        let dy = g.viewed("dy", &dims, self.view, Fill::Signed)?;
        refuse_all(g);
        g.graph.push(Op::SsmConvBack { wrt }, &[o.x, o.w, o.state, o.seqs, dy], "y")
    }

    fn exit(&self, g: &mut CaseGraph) -> Made {
        let o = self.operands(g)?;
        ask_nothing(g, &["w"]);
        g.graph.ssm_conv_state(o.x, o.state, o.seqs, "y")
    }

    fn exit_back(&self, g: &mut CaseGraph, wrt: SsmConvStateOperand) -> Made {
        let o = self.operands(g)?;
        let dims = [self.packing.count(), self.taps - 1, self.channels];
        let dy = g.viewed("dy", &dims, self.view, Fill::Signed)?;
        refuse_all(g);
        ask_nothing(g, &["w"]);
        g.graph.push(Op::SsmConvStateBack { wrt }, &[o.x, o.state, o.seqs, dy], "y")
    }
}

fn convs() -> Vec<(String, Conv)> {
    let mut all = Vec::new();
    let mut add = |packing: Packing, channels, taps| {
        let name = format!("{channels} channels, {taps} taps, {}", packing.name);
        all.push((name, Conv { packing, channels, taps, view: View::Plain }));
    };
    for packing in ALL {
        // The gradient of the taps has few elements, of which one in some hundred cancels.
        for (channels, taps) in [(13, 4), (16, 3), (33, 4), (39, 2), (20, 6)] {
            add(packing, channels, taps);
        }
    }
    add(PACKED, 300, 4);
    all
}

fn views() -> impl Iterator<Item = View> {
    [View::Columns, View::Rows, View::Transposed, View::TransposedColumns].into_iter()
}

/// The convolution with some input repeated.
fn repeats() -> impl Iterator<Item = View> {
    [View::Repeated, View::RepeatedColumns].into_iter()
}

const CONV: Conv = Conv { packing: PACKED, channels: 21, taps: 4, view: View::Plain };

pub fn conv(c: &mut Cases) {
    for (name, conv) in convs() {
        c.add(name, move |g| conv.conv(g));
    }
    for packing in [ONE, PACKED] {
        let conv = Conv { packing, channels: 9, taps: 1, view: View::Plain };
        c.add(format!("one tap, {}", packing.name), move |g| conv.conv(g));
    }
    for view in views().chain(repeats()) {
        c.add(format!("{view:?}"), move |g| {
            g.cotangent_viewed(&[CONV.packing.rows, CONV.channels], view)?;
            Conv { view, ..CONV }.conv(g)
        });
    }
    c.add("outputs and exit state of one input", |g| {
        let o = CONV.operands(g)?;
        let y = g.graph.ssm_conv(o.x, o.w, o.state, o.seqs, "y")?;
        let exit = g.graph.ssm_conv_state(o.x, o.state, o.seqs, "exit")?;
        let y = g.graph.reshape(y, &[CONV.packing.rows * CONV.channels])?;
        let exit = g.graph.reshape(exit, &[CONV.packing.count() * 3 * CONV.channels])?;
        g.graph.concat(&[y, exit], 0)
    });
    for (name, seqs) in OUTSIDE {
        let conv = Conv { packing: outside(seqs), ..CONV };
        c.add_outside(name, move |g| conv.conv(g));
    }
}

pub fn conv_back(c: &mut Cases) {
    use SsmConvOperand::{State, Weight, X};
    for wrt in [X, Weight, State] {
        for (name, conv) in convs() {
            c.add(format!("{wrt:?}, {name}"), move |g| conv.back(g, wrt));
        }
        for view in views().chain(repeats()) {
            let conv = Conv { view, ..CONV };
            c.add(format!("{wrt:?}, {view:?}"), move |g| conv.back(g, wrt));
        }
        for (name, seqs) in OUTSIDE {
            let conv = Conv { packing: outside(seqs), ..CONV };
            c.add_outside(format!("{wrt:?}, {name}"), move |g| conv.back(g, wrt));
        }
    }
}

pub fn conv_state(c: &mut Cases) {
    for (name, conv) in convs() {
        c.add(name, move |g| {
            let y = conv.exit(g)?;
            if !conv.keeps() {
                ask_nothing(g, &["state"]);
            }
            Ok(y)
        });
    }
    for view in views().chain(repeats()) {
        c.add(format!("{view:?}"), move |g| {
            g.cotangent_viewed(&[CONV.packing.count(), 3, CONV.channels], view)?;
            Conv { view, ..CONV }.exit(g)
        });
    }
    for (name, seqs) in OUTSIDE {
        let conv = Conv { packing: outside(seqs), ..CONV };
        c.add_outside(name, move |g| conv.exit(g));
    }
}

pub fn conv_state_back(c: &mut Cases) {
    for wrt in [SsmConvStateOperand::X, SsmConvStateOperand::State] {
        let all = convs().into_iter();
        // What is zero everywhere shows nothing.
        for (name, conv) in all.filter(|(_, conv)| wrt == SsmConvStateOperand::X || conv.keeps()) {
            c.add(format!("{wrt:?}, {name}"), move |g| conv.exit_back(g, wrt));
        }
        for view in views() {
            let conv = Conv { view, ..CONV };
            c.add(format!("{wrt:?}, {view:?}"), move |g| conv.exit_back(g, wrt));
        }
        for (name, seqs) in OUTSIDE {
            let conv = Conv { packing: outside(seqs), ..CONV };
            c.add_outside(format!("{wrt:?}, {name}"), move |g| conv.exit_back(g, wrt));
        }
    }
}

// ---- selective scan ---------------------------------------------------------------------------

#[derive(Copy, Clone)]
struct Scan {
    packing: Packing,
    heads: usize,
    width: usize,
    groups: usize,
    states: usize,
    /// One decay per head (Mamba-2), not one per place of the state (Mamba-1).
    scalar: bool,
    view: View,
    part: Part,
}

const MAMBA1: Scan = Scan {
    packing: PACKED,
    heads: 18,
    width: 1,
    groups: 1,
    states: 16,
    scalar: false,
    view: View::Plain,
    part: Part::Flat,
};
const MAMBA2: Scan =
    Scan { packing: PACKED, heads: 4, width: 5, groups: 2, states: 6, scalar: true, ..MAMBA1 };

impl Scan {
    fn operands(&self, g: &mut CaseGraph) -> Result<[NodeId; 7], Invalid> {
        let Scan { packing, heads, width, groups, states, scalar, view, .. } = *self;
        let rows = packing.rows;
        let decays = if scalar { 1 } else { states };
        let slow = packing.slowness();
        Ok([
            g.viewed("x", &[rows, heads, width], view, Fill::Signed)?,
            g.viewed("dt", &[rows, heads], view, Fill::Between(0.1 / slow, 0.9 / slow))?,
            g.viewed("a", &[heads, decays], view, Fill::Between(-1.5, -0.2))?,
            g.viewed("b", &[rows, groups, states], view, Fill::Signed)?,
            g.viewed("c", &[rows, groups, states], view, Fill::Signed)?,
            g.viewed("state", &[packing.count(), heads, width, states], view, Fill::Signed)?,
            packing.seqs(g)?,
        ])
    }

    fn scan(&self, g: &mut CaseGraph) -> Made {
        let operands = self.operands(g)?;
        match self.part {
            Part::Flat => g.graph.push(Op::SsmScan, &operands, "y"),
            Part::Outputs => Ok(g.graph.ssm_scan(operands, "y")?.0),
            Part::ExitStates => {
                ask_nothing(g, &["c"]);
                Ok(g.graph.ssm_scan(operands, "y")?.1)
            }
        }
    }

    fn back(&self, g: &mut CaseGraph, parts: usize) -> Made {
        let mut operands = self.operands(g)?.to_vec();
        let Scan { packing, heads, width, states, view, .. } = *self;
        operands.push(g.viewed("dy", &[packing.rows, heads, width], view, Fill::Signed)?);
        let exit = [packing.count(), heads, width, states];
        operands.push(g.viewed("dexit", &exit, view, Fill::Signed)?);
        refuse_all(g);
        g.graph.push(Op::SsmScanBack { parts }, &operands, "y")
    }
}

fn scans() -> Vec<(String, Scan)> {
    let mut all = Vec::new();
    let mut add = |name: String, scan: Scan| all.push((name, scan));
    for packing in ALL {
        let name = packing.name;
        add(format!("mamba-1, {name}"), Scan { packing, ..MAMBA1 });
        add(format!("mamba-2, {name}"), Scan { packing, ..MAMBA2 });
        for part in [Part::Outputs, Part::ExitStates] {
            let what = if part == Part::Outputs { "outputs" } else { "exit states" };
            add(format!("mamba-1, {name}, {what}"), Scan { packing, part, ..MAMBA1 });
            add(format!("mamba-2, {name}, {what}"), Scan { packing, part, ..MAMBA2 });
        }
    }
    for (heads, groups) in [(1, 1), (2, 2), (3, 1), (6, 3), (8, 2)] {
        for (width, states, scalar) in [(3, 4, true), (17, 20, true), (4, 3, false)] {
            let decay = if scalar { "one decay" } else { "decays" };
            add(
                format!("{heads} heads of {width} in {groups} groups, {states} states, {decay}"),
                Scan { packing: SHORT, heads, width, groups, states, scalar, ..MAMBA1 },
            );
        }
    }
    add("one state".into(), Scan { states: 1, ..MAMBA2 });
    add("wide states".into(), Scan { states: 37, packing: SHORT, ..MAMBA1 });
    all
}

pub fn scan(c: &mut Cases) {
    for (name, scan) in scans() {
        c.add(name, move |g| scan.scan(g));
    }
    for view in views().chain(repeats()) {
        for (name, scan) in [("mamba-1", MAMBA1), ("mamba-2", MAMBA2)] {
            let scan = Scan { packing: SHORT, view, part: Part::Outputs, ..scan };
            c.add(format!("{name}, {view:?}"), move |g| {
                g.cotangent_viewed(&[scan.packing.rows, scan.heads, scan.width], view)?;
                scan.scan(g)
            });
        }
    }
    c.add("the exit state of one is the entry state of the next", |g| {
        let scan = Scan { packing: ONE, heads: 2, ..MAMBA2 };
        let operands = scan.operands(g)?;
        let (y, exit) = g.graph.ssm_scan(operands, "first")?;
        let [_, dt, a, b, c, _, seqs] = operands;
        Ok(g.graph.ssm_scan([y, dt, a, b, c, exit, seqs], "second")?.0)
    });
    for (name, seqs) in OUTSIDE {
        let scan = Scan { packing: outside(seqs), ..MAMBA2 };
        c.add_outside(name, move |g| scan.scan(g));
    }
}

pub fn scan_back(c: &mut Cases) {
    for (name, scan) in scans().into_iter().filter(|(_, scan)| scan.part == Part::Flat) {
        let heads = scan.heads / scan.groups;
        for parts in [1, 2, heads].into_iter().filter(|&parts| parts <= heads) {
            c.add(format!("{parts} parts, {name}"), move |g| scan.back(g, parts));
        }
    }
    for parts in [4, 5, 11, 13] {
        c.add(format!("{parts} parts of 18 heads"), move |g| MAMBA1.back(g, parts));
    }
    for view in views() {
        let scan = Scan { view, ..MAMBA2 };
        c.add(format!("{view:?}"), move |g| scan.back(g, 2));
    }
    for (name, seqs) in OUTSIDE {
        let scan = Scan { packing: outside(seqs), ..MAMBA2 };
        c.add_outside(name, move |g| scan.back(g, 1));
    }
}

// ---- gated delta rule -------------------------------------------------------------------------

#[derive(Copy, Clone)]
struct Delta {
    packing: Packing,
    /// Key heads and value heads.
    heads: (usize, usize),
    /// Widths of keys and of values.
    widths: (usize, usize),
    /// One decay per row of the state, not one per head.
    rows_decay: bool,
    key_heads: KeyHeads,
    scale: Option<f32>,
    view: View,
    part: Part,
}

const DELTA: Delta = Delta {
    packing: PACKED,
    heads: (2, 4),
    widths: (6, 5),
    rows_decay: false,
    key_heads: KeyHeads::Cycle,
    scale: None,
    view: View::Plain,
    part: Part::Flat,
};

impl Delta {
    fn attrs(&self) -> GatedDeltaAttrs {
        let scale = self.scale.unwrap_or(1.0 / (self.widths.0 as f32).sqrt());
        GatedDeltaAttrs { scale: scale.into(), key_heads: self.key_heads }
    }

    fn operands(&self, g: &mut CaseGraph) -> Result<[NodeId; 7], Invalid> {
        let Delta { packing, heads: (key_heads, heads), widths: (keys, width), view, .. } = *self;
        let rows = packing.rows;
        // Keys of length about 0.9.
        let most = 1.5 / (keys as f64).sqrt();
        let unit = Fill::Between(-most, most);
        let mut decays = vec![rows, heads];
        let slow = packing.slowness();
        if self.rows_decay {
            decays.push(keys);
        }
        Ok([
            g.viewed("q", &[rows, key_heads, keys], view, Fill::Signed)?,
            g.viewed("k", &[rows, key_heads, keys], view, unit)?,
            g.viewed("v", &[rows, heads, width], view, Fill::Signed)?,
            g.viewed("g", &decays, view, Fill::Between(-1.0 / slow, -0.1 / slow))?,
            g.viewed("beta", &[rows, heads], view, Fill::Between(0.1 / slow, 0.9 / slow))?,
            g.viewed("state", &[packing.count(), heads, keys, width], view, Fill::Signed)?,
            packing.seqs(g)?,
        ])
    }

    fn delta(&self, g: &mut CaseGraph) -> Made {
        let operands = self.operands(g)?;
        match self.part {
            Part::Flat => g.graph.push(Op::GatedDeltaRule(self.attrs()), &operands, "y"),
            Part::Outputs => Ok(g.graph.gated_delta_rule(self.attrs(), operands, "y")?.0),
            Part::ExitStates => {
                ask_nothing(g, &["q"]);
                Ok(g.graph.gated_delta_rule(self.attrs(), operands, "y")?.1)
            }
        }
    }

    fn back(&self, g: &mut CaseGraph) -> Made {
        let mut operands = self.operands(g)?.to_vec();
        let Delta { packing, heads: (_, heads), widths: (keys, width), view, .. } = *self;
        operands.push(g.viewed("dy", &[packing.rows, heads, width], view, Fill::Signed)?);
        let exit = [packing.count(), heads, keys, width];
        operands.push(g.viewed("dexit", &exit, view, Fill::Signed)?);
        refuse_all(g);
        g.graph.push(Op::GatedDeltaRuleBack(self.attrs()), &operands, "y")
    }
}

fn deltas() -> Vec<(String, Delta)> {
    let mut all = Vec::new();
    let mut add = |name: String, delta: Delta| {
        for (rows_decay, decay) in [(false, "a decay per head"), (true, "decays per row")] {
            all.push((format!("{name}, {decay}"), Delta { rows_decay, ..delta }));
        }
    };
    for packing in ALL {
        let name = packing.name;
        add(name.into(), Delta { packing, ..DELTA });
        for part in [Part::Outputs, Part::ExitStates] {
            let what = if part == Part::Outputs { "outputs" } else { "exit states" };
            add(format!("{name}, {what}"), Delta { packing, part, ..DELTA });
        }
    }
    for heads in [(1, 1), (3, 3), (1, 3), (2, 6), (3, 6)] {
        let (key, value) = heads;
        let name = format!("{value} heads on {key}");
        add(name.clone(), Delta { heads, packing: SHORT, ..DELTA });
        if value > key {
            let key_heads = KeyHeads::Blocks;
            add(format!("{name} in blocks"), Delta { heads, packing: SHORT, key_heads, ..DELTA });
        }
    }
    for widths in [(1, 1), (4, 4), (16, 16), (17, 3), (3, 18), (20, 33), (32, 16), (15, 40)] {
        let (keys, width) = widths;
        // Some hundred elements, of which few come out small.
        let heads = if keys * width < 16 { (2, 8) } else { (1, 2) };
        add(format!("widths {keys} and {width}"), Delta { widths, heads, packing: SHORT, ..DELTA });
    }
    add("widths 16 and 32, packed".into(), Delta { widths: (16, 32), ..DELTA });
    add("a scale of 2".into(), Delta { scale: Some(2.0), ..DELTA });
    add("blocks, packed".into(), Delta { key_heads: KeyHeads::Blocks, ..DELTA });
    all
}

pub fn delta(c: &mut Cases) {
    for (name, delta) in deltas() {
        c.add(name, move |g| delta.delta(g));
    }
    for view in views().chain(repeats()) {
        for rows_decay in [false, true] {
            let delta = Delta { packing: SHORT, view, rows_decay, part: Part::Outputs, ..DELTA };
            let name = if rows_decay { "decays per row" } else { "a decay per head" };
            c.add(format!("{view:?}, {name}"), move |g| {
                g.cotangent_viewed(&[delta.packing.rows, delta.heads.1, delta.widths.1], view)?;
                delta.delta(g)
            });
        }
    }
    c.add("the exit state of one is the entry state of the next", |g| {
        let delta = Delta { packing: ONE, ..DELTA };
        let operands = delta.operands(g)?;
        let (y, exit) = g.graph.gated_delta_rule(delta.attrs(), operands, "first")?;
        let [q, k, _, decay, beta, _, seqs] = operands;
        let next = [q, k, y, decay, beta, exit, seqs];
        Ok(g.graph.gated_delta_rule(delta.attrs(), next, "second")?.0)
    });
    for (name, seqs) in OUTSIDE {
        let delta = Delta { packing: outside(seqs), ..DELTA };
        c.add_outside(name, move |g| delta.delta(g));
    }
}

pub fn delta_back(c: &mut Cases) {
    for (name, delta) in deltas().into_iter().filter(|(_, delta)| delta.part == Part::Flat) {
        c.add(name, move |g| delta.back(g));
    }
    for view in views() {
        let delta = Delta { view, ..DELTA };
        c.add(format!("{view:?}"), move |g| delta.back(g));
    }
    for (name, seqs) in OUTSIDE {
        let delta = Delta { packing: outside(seqs), ..DELTA };
        c.add_outside(name, move |g| delta.back(g));
    }
}

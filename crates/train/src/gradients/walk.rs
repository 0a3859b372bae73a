//! The walk: one sequence longer than a graph, chunk by chunk, with the loss and the gradient of
//! the whole.
//!
//! Forward through the chunks, each of which leaves keys and values for all later ones and the
//! states of recurrent layers for the next. Then back: each chunk runs again with its gradient,
//! which begins from its own loss and from what later chunks sent back to its keys, values (before
//! they were rounded) and exit states, and sends back to earlier ones what it owes them.

use std::ops::{Deref, Range};

use graph::Stop;
use model::Model;

use super::graphs::{Inputs, Kind, Output, Run};
use super::{Goal, Gradients, Parameters, check_loss, lay_out, weigh};
use crate::{Error, Example, Result, Window, piece};

/// The fewest rows with loss that a chunk's head is built for, if it has that many.
const LEAST_LABELLED: usize = 64;

/// Which graphs a walk runs.
pub(super) struct Survey {
    /// Per chunk up to the last with loss: its rows.
    ranges: Vec<Range<usize>>,
    /// Per chunk: its graph forward, and the one with its gradient, where it needs that.
    forward: Vec<Option<Kind>>,
    backward: Vec<Option<Kind>>,
}

impl Survey {
    pub(super) fn kinds(&self) -> Vec<Kind> {
        self.forward.iter().chain(&self.backward).flatten().copied().collect()
    }

    /// Which chunks run forward, and which with their gradient.
    #[cfg(test)]
    pub(super) fn runs(&self) -> (String, String) {
        let list = |kinds: &[Option<Kind>]| {
            kinds.iter().map(|k| if k.is_some() { '1' } else { '0' }).collect()
        };
        (list(&self.forward), list(&self.backward))
    }
}

/// What a walk does next.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Stage {
    /// Clear what was sent to a part, from a number on.
    Clear {
        part: usize,
        at: usize,
    },
    /// Run a chunk forward, and the following up to `until`; `again` where only the states before
    /// `until` are wanted.
    Forward {
        chunk: usize,
        until: usize,
        again: bool,
    },
    /// Keep what such a chunk leaves, from a byte of a part on.
    Keep {
        chunk: usize,
        until: usize,
        again: bool,
        part: usize,
        at: usize,
    },
    /// Run a chunk with its gradient.
    Back {
        chunk: usize,
    },
    /// Send back to earlier chunks, from a number of a part on.
    Send {
        chunk: usize,
        part: usize,
        at: usize,
    },
    /// The gradients of a chunk are there to be taken.
    Ready {
        chunk: usize,
    },
    Done,
}

/// A walk under way.
pub(super) struct Walk {
    example: Example,
    /// Its number among all examples.
    number: u32,
    goal: Goal,
    /// The weight its loss is divided by.
    total: f64,
    survey: Survey,
    /// Per chunk, the weights and losses of its rows.
    losses: Vec<(Vec<f32>, Vec<f32>)>,
    stage: Stage,
    run: Option<Run>,
}

fn lost() -> Error {
    Error::Stopped("a chunk of a walk went missing".into())
}

impl Walk {
    /// True unless it is done, or is after its last gradients have been taken.
    pub(super) fn goes_on(&self) -> bool {
        match self.stage {
            Stage::Done => false,
            Stage::Ready { chunk } => self.next(chunk).is_some(),
            _ => true,
        }
    }

    /// The next chunk back that has a gradient.
    fn next(&self, chunk: usize) -> Option<usize> {
        let earlier = self.survey.backward.get(..chunk)?;
        earlier.iter().rposition(Option::is_some)
    }

    /// The run whose gradients are to be taken.
    pub(super) fn run(&self) -> Result<&Run> {
        self.run.as_ref().ok_or_else(lost)
    }

    /// The loss so far.
    pub(super) fn loss(&self) -> f64 {
        self.losses.iter().fold(0.0, |sum, (weights, nll)| weigh(sum, weights, nll))
    }

    /// The inputs of a chunk's graph.
    fn inputs(&self, chunk: usize, kind: Kind, rows: usize, near: usize) -> Result<Inputs> {
        let range = self.survey.ranges.get(chunk).ok_or_else(lost)?;
        let of = std::iter::once((&self.example, self.number, range.clone()));
        let masks = kind.masks(self.goal);
        let mut inputs = lay_out(of, (rows, 1, kind.labelled), self.total, masks);
        let earlier = kind.earlier.unwrap_or(0);
        inputs.ints.push(("table", (0..earlier as i32).collect()));
        // What of the pages a gradient is taken of; those before the first are not read.
        let first = chunk.saturating_sub(near);
        inputs.ints.push(("horizon", (first..first + near).map(|i| i as i32).collect()));
        Ok(inputs)
    }
}

impl<M: Deref<Target = Model>> Gradients<M> {
    /// How many of `earlier` chunks attention sends gradients back to.
    pub(super) fn within_horizon(&self, earlier: usize) -> usize {
        match self.walks.map_or(0, |walks| walks.horizon) {
            0 => earlier,
            horizon => horizon.div_ceil(self.config.rows).min(earlier),
        }
    }

    /// How many chunks a graph can read that is to read so many: rounded up, so that few graphs
    /// serve all chunks, but never more than the longest window has.
    fn readable(&self, earlier: usize) -> usize {
        let most = self.longest().div_ceil(self.config.rows).saturating_sub(1);
        if earlier == 0 { 0 } else { earlier.next_power_of_two().min(most) }
    }

    /// The graphs that a window's walk runs, all of which are then built but for those that
    /// [`Survey::kinds`] lists; and the memory that it takes.
    pub(super) fn survey(
        &mut self,
        window: &Window,
        forward: bool,
        parameters: &Parameters,
    ) -> Result<Survey> {
        let (rows, longest) = (self.config.rows, self.longest());
        let [example] = window.examples.as_slice() else {
            return Err(Error::Data(format!(
                "a window of {} rows and {} sequences; one that is longer than the {rows} rows of a \
                 chunk has one sequence",
                window.rows(),
                window.examples.len()
            )));
        };
        if example.rows() > longest {
            return Err(Error::Data(format!(
                "a window of {} rows; at most {longest} fit",
                example.rows()
            )));
        }
        // Row `i` predicts token `i + 1`. After the last that carries loss nothing is run.
        let loud = |i: &usize| example.weights.get(i + 1).is_some_and(|&w| w != 0.0);
        let end = (0..example.rows()).rev().find(loud).map_or(0, |last| last + 1);
        let ranges: Vec<Range<usize>> =
            (0..end).step_by(rows).map(|start| start..end.min(start + rows)).collect();
        let labelled = |range: &Range<usize>| match range.clone().filter(loud).count() {
            0 => 0,
            n => n.next_power_of_two().max(LEAST_LABELLED).min(rows),
        };
        let readable: Vec<usize> = (0..ranges.len()).map(|chunk| self.readable(chunk)).collect();
        let of_kind = self.kind(0, None, false, forward);
        let kind = |chunk: usize, labelled: usize, backward: bool| Kind {
            labelled,
            earlier: readable.get(chunk).copied(),
            backward,
            ..of_kind
        };
        let Some(last) = ranges.len().checked_sub(1) else {
            return Err(Error::Data("no token of the window carries loss".into()));
        };
        let mut survey = Survey { ranges: Vec::new(), forward: Vec::new(), backward: Vec::new() };
        for (chunk, range) in ranges.iter().enumerate() {
            survey.forward.push(match forward {
                true => Some(kind(chunk, labelled(range), false)),
                false => (chunk < last).then(|| kind(chunk, 0, false)),
            });
        }
        survey.backward.resize(ranges.len(), None);
        // What a chunk leaves to others is known once a graph of one is built.
        let of_last = kind(last, ranges.last().map_or(0, labelled), !forward);
        self.build(of_last, parameters)?;
        if !forward {
            // The first position that gradients of attention are sent back to.
            let mut reach = usize::MAX;
            let parts = &self.memory.parts;
            let moves = |is_state| parts.iter().any(|p| p.moves && p.is_state == is_state);
            let (pages, states) = (moves(false), moves(true));
            let horizon = self.walks.map_or(0, |walks| walks.horizon);
            let horizon = if horizon == 0 { usize::MAX } else { horizon };
            for (chunk, range) in ranges.iter().enumerate().rev() {
                let labelled = labelled(range);
                let receives = pages && reach < range.end || states && chunk < last;
                if labelled > 0 || receives {
                    reach = reach.min(range.start.saturating_sub(horizon));
                    let kind = kind(chunk, labelled, true);
                    survey.backward.get_mut(chunk).ok_or_else(lost)?.replace(kind);
                }
            }
        }
        let (most, trained) = self.chunks;
        let here = ranges.len();
        let chunks = (most.max(here), if forward { trained } else { trained.max(here) });
        let read = self.readable(chunks.0 - 1);
        let budget = self.walks.map_or(0, |walks| walks.host_budget);
        self.memory.extent = self.memory.fit((chunks.0, chunks.1, read), rows, budget)?;
        self.chunks = chunks;
        survey.ranges = ranges;
        Ok(survey)
    }

    pub(super) fn begin_walk(
        &mut self,
        window: &Window,
        total: f64,
        goal: Goal,
        parameters: &Parameters,
    ) -> Result<Walk> {
        let forward = goal.is_loss();
        let survey = self.survey(window, forward, parameters)?;
        for kind in survey.kinds() {
            let built = self.build(kind, parameters)?;
            self.take(built)?;
        }
        self.memory.reserve()?;
        let example = window.examples.first().cloned().ok_or_else(lost)?;
        let number = window.numbers.first().copied().unwrap_or(u32::MAX);
        let losses = vec![(Vec::new(), Vec::new()); survey.ranges.len()];
        let stage = match forward {
            true => Stage::Forward { chunk: 0, until: survey.ranges.len(), again: false },
            false => Stage::Clear { part: 0, at: 0 },
        };
        Ok(Walk { example, number, goal, total, survey, losses, stage, run: None })
    }

    /// Goes on until the gradients of a chunk are there or all is done, which is true, or until
    /// `stop` says so.
    pub(super) fn advance_walk(
        &mut self,
        walk: &mut Walk,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<bool> {
        let chunks = walk.survey.ranges.len();
        loop {
            match walk.stage {
                Stage::Clear { part, at } => {
                    walk.stage = match self.clear(chunks, part, at)? {
                        Some((part, at)) => Stage::Clear { part, at },
                        None => Stage::Forward { chunk: 0, until: chunks - 1, again: false },
                    };
                }
                Stage::Forward { chunk, until, .. } if chunk == until => {
                    let trained = walk.survey.backward.iter().any(Option::is_some);
                    walk.stage = if trained { Stage::Back { chunk } } else { Stage::Done };
                }
                Stage::Forward { chunk, until, again } => {
                    if !self.run_chunk(walk, chunk, false, parameters, stop)? {
                        return Ok(false);
                    }
                    walk.stage = Stage::Keep { chunk, until, again, part: 0, at: 0 };
                }
                Stage::Keep { chunk, until, again, part, at } => {
                    let next = match chunk + 1 < chunks {
                        true => self.keep(walk.run()?, (chunk, again), part, at)?,
                        false => None,
                    };
                    walk.stage = match next {
                        Some((part, at)) => Stage::Keep { chunk, until, again, part, at },
                        None => {
                            walk.run = None;
                            Stage::Forward { chunk: chunk + 1, until, again }
                        }
                    };
                }
                Stage::Back { chunk } => {
                    if !self.run_chunk(walk, chunk, true, parameters, stop)? {
                        return Ok(false);
                    }
                    walk.stage = Stage::Send { chunk, part: 0, at: 0 };
                }
                Stage::Send { chunk, part, at } => {
                    walk.stage = match self.send(walk.run()?, chunk, part, at)? {
                        Some((part, at)) => Stage::Send { chunk, part, at },
                        None => Stage::Ready { chunk },
                    };
                    if walk.stage == (Stage::Ready { chunk }) {
                        return Ok(true);
                    }
                }
                Stage::Ready { chunk } => {
                    walk.run = None;
                    walk.stage = match walk.next(chunk) {
                        None => Stage::Done,
                        Some(until) => match self.memory.checkpoint(until) {
                            chunk if chunk == until || !self.has_states() => {
                                Stage::Back { chunk: until }
                            }
                            chunk => Stage::Forward { chunk, until, again: true },
                        },
                    };
                }
                Stage::Done => return Ok(true),
            }
            if stop.should_stop() {
                return Ok(false);
            }
        }
    }

    fn has_states(&self) -> bool {
        self.memory.parts.iter().any(|p| p.is_state)
    }

    /// Runs a chunk's graph to its end, which is true, or until `stop` says so.
    fn run_chunk(
        &mut self,
        walk: &mut Walk,
        chunk: usize,
        backward: bool,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<bool> {
        let run = match &mut walk.run {
            Some(run) => run,
            None => {
                let survey = &walk.survey;
                let kinds = if backward { &survey.backward } else { &survey.forward };
                let kind = kinds.get(chunk).copied().flatten().ok_or_else(lost)?;
                let near = self.within_horizon(kind.earlier.unwrap_or(0));
                let inputs = walk.inputs(chunk, kind, self.config.rows, near)?;
                let last = chunk + 1 == survey.ranges.len();
                walk.run.insert(self.begin_run(kind, inputs, Some((chunk, last)), parameters)?)
            }
        };
        if !self.advance_run(run, parameters, stop)? {
            return Ok(false);
        }
        if run.inputs.loud > 0 && self.built(run)?.kind.labelled > 0 {
            let (weights, nll) = walk.losses.get_mut(chunk).ok_or_else(lost)?;
            weights.clone_from(&run.inputs.weights);
            nll.clear();
            self.losses_of(run, nll)?;
            // Said now, while the chunk that is to blame can be run again.
            check_loss(weigh(0.0, weights, nll))?;
        }
        Ok(true)
    }

    /// Clears a piece of what was sent to a part of the chunks before the last of a walk. Returns
    /// where the next piece begins.
    fn clear(&mut self, chunks: usize, part: usize, at: usize) -> Result<Option<(usize, usize)>> {
        let Some(of) = self.memory.parts.get(part) else { return Ok(None) };
        let end = match (of.moves, of.is_state) {
            (false, _) => 0,
            (true, true) => of.elements,
            (true, false) => of.elements * (chunks - 1),
        };
        let to = end.min(at + piece::NUMBERS);
        let (sent, _) = self.memory.sent_mut(part)?;
        sent.get_mut(at.min(to)..to).ok_or_else(lost)?.fill(0.0);
        Ok(Some(if to < end { (part, to) } else { (part + 1, 0) }))
    }

    /// Copies a piece of what a chunk leaves. Returns where the next piece begins.
    fn keep(
        &mut self,
        run: &Run,
        (chunk, again): (usize, bool),
        part: usize,
        at: usize,
    ) -> Result<Option<(usize, usize)>> {
        let Some(of) = self.memory.parts.get(part) else { return Ok(None) };
        if again && !of.is_state {
            return Ok(Some((part + 1, 0)));
        }
        let to = match of.is_state {
            true => bytemuck::cast_slice_mut(self.memory.state_mut(chunk + 1, part)?),
            false => self.memory.kept_mut(chunk, part)?,
        };
        let built = self.built.get(run.built).ok_or_else(lost)?;
        let output = built.find(Output::Kept(part)).ok_or_else(lost)?;
        let end = to.len().min(at + piece::BYTES);
        let piece = to.get_mut(at..end).ok_or_else(lost)?;
        built.placed.read_part(&self.workspace, output, at, piece)?;
        Ok(Some(if end < to.len() { (part, end) } else { (part + 1, 0) }))
    }

    /// Adds a piece of a chunk's gradient to what earlier chunks' keys and values receive, or puts
    /// it where the exit state of the one before does. Returns where the next piece begins.
    fn send(
        &mut self,
        run: &Run,
        chunk: usize,
        part: usize,
        at: usize,
    ) -> Result<Option<(usize, usize)>> {
        let Some(of) = self.memory.parts.get(part) else { return Ok(None) };
        let built = self.built.get(run.built).ok_or_else(lost)?;
        let Some(output) = built.find(Output::Sent(part)) else { return Ok(Some((part + 1, 0))) };
        let (is_state, elements, rows) = (of.is_state, of.elements, self.config.rows);
        // Where the graph's gradient begins among all that is sent, and from where on it counts.
        let near = self.within_horizon(built.kind.earlier.unwrap_or(0));
        let first = if is_state { 0 } else { chunk.saturating_sub(near) * elements };
        let horizon = self.walks.map_or(0, |walks| walks.horizon);
        let from = match horizon {
            0 => 0,
            horizon => (chunk * rows).saturating_sub(horizon) * (elements / rows),
        };
        let (start, end) = match is_state {
            true => (0, elements),
            false => (first.max(from), chunk * elements),
        };
        let at = at.max(start);
        let to = end.min(at + piece::NUMBERS);
        let (sent, buffer) = self.memory.sent_mut(part)?;
        let sent = sent.get_mut(at..to).ok_or_else(lost)?;
        let piece = buffer.get_mut(..sent.len()).ok_or_else(lost)?;
        let bytes = bytemuck::cast_slice_mut(piece);
        built.placed.read_part(&self.workspace, output, (at - first) * 4, bytes)?;
        match is_state {
            true => sent.copy_from_slice(piece),
            false => sent.iter_mut().zip(piece).for_each(|(a, b)| *a += *b),
        }
        Ok(Some(if to < end { (part, to) } else { (part + 1, 0) }))
    }
}

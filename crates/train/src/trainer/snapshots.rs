//! What a run is at, as it is written down and gone on from.

use std::ops::Deref;

use model::{Adapter, Model};

use super::{Advance, Best, Event, Trainer, Work};
use crate::checkpoint::{Cursor, Identity, Snapshot};
use crate::held_out::HeldOut;
use crate::piece::At;
use crate::{Checkpoints, Result};

impl<M: Deref<Target = Model>> Trainer<M> {
    fn identity(&self) -> Identity {
        let model = self.gradients.model();
        Identity {
            settings: self.config.settings(),
            start: self.start,
            data: self.data,
            model: model.fingerprint(),
            family: model.device().family().to_string(),
            numerics: graph::NUMERICS,
        }
    }

    fn cursor(&self) -> Cursor {
        Cursor {
            steps: self.optimizer.steps,
            first_step: self.first_step,
            next: self.next,
            epoch_loss: self.epoch_loss,
            last_loss: self.last_loss,
            best: self.best.as_ref().map(|b| (b.step, b.loss, b.since)),
            due: matches!(&self.work, Work::HeldOut(held_out) if !held_out.whole_epoch),
            moved: self.moved.clone(),
        }
    }

    /// What the run is at after the last whole step: one that has begun to move parameters is
    /// brought to its end, and reported by the next [`Trainer::advance`].
    ///
    /// # Errors
    /// When that step fails; there is nothing whole to go on from then.
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.fill()?;
        self.settle()?;
        Ok(self.whole_snapshot(false))
    }

    fn whole_snapshot(&mut self, is_last: bool) -> Snapshot {
        let (mut snapshot, mut at) = (self.new_snapshot(), At::default());
        while let Some(next) = self.copy_piece(&mut snapshot, at, is_last) {
            at = next;
        }
        snapshot
    }

    /// As [`Trainer::snapshot`], where the run ends before its time: the memory of its graphs and
    /// gradients is given back first and the moments are given away, so that it takes hardly any
    /// beside what was planned. What is left is to [`Trainer::finish`].
    ///
    /// # Errors
    /// As there.
    pub fn last_snapshot(&mut self) -> Result<Snapshot> {
        self.fill()?;
        self.settle()?;
        self.gradients.release();
        if let Work::Step(_) | Work::Snapshot(..) = &self.work {
            // With its gradients, or what has been copied.
            self.work = Work::Next;
        }
        Ok(self.whole_snapshot(true))
    }

    /// True while some of what a snapshot holds is of the next step, and the rest is not.
    pub(super) fn is_halfway(&self) -> bool {
        matches!(&self.work, Work::Step(step) if step.is_moving())
    }

    /// Brings such a step to its end, or the copies of the best parameters, so that what is there is
    /// of one step.
    pub(super) fn settle(&mut self) -> Result<()> {
        while self.is_halfway() || matches!(&self.work, Work::Keep(_)) {
            if let Advance::Event(event) = self.go_on(&())? {
                self.unreported.push_back(event);
            }
        }
        Ok(())
    }

    /// Adds a piece of a parameter to a snapshot, of the last one with the moments themselves, and
    /// returns what comes next; `None` where it is whole.
    fn copy_piece(&mut self, snapshot: &mut Snapshot, at: At, is_last: bool) -> Option<At> {
        let name = self.names.get(at.list)?;
        let values = self.parameters.value_mut(name).unwrap_or(&mut []);
        let (len, range) = (values.len(), at.piece(values.len()));
        let mut add = |part: &str, values: &[f32]| {
            let piece = values.get(range.clone()).unwrap_or(&[]);
            snapshot.add(part, name, piece, len);
        };
        add("value", values);
        let best = self.best.as_ref().and_then(|best| best.values.get(at.list));
        best.into_iter().for_each(|best| add("best", best));
        if !is_last {
            let moments = self.optimizer.moments.get(name).into_iter().flatten();
            moments.enumerate().for_each(|(i, moment)| add(&format!("moment{i}"), moment));
        } else if let Some(moments) = self.optimizer.moments.remove(name) {
            moments.into_iter().enumerate().for_each(|(i, all)| snapshot.give(i, name, all));
        }
        Some(at.after(len))
    }

    /// Goes on from a snapshot of the same run, after [`Trainer::load`]. `any_bits` also takes
    /// one that was made with other kernels or another arithmetic, after which bits are no longer
    /// the same.
    ///
    /// # Errors
    /// When it is of another model, other settings or other data, by name.
    pub fn restore(&mut self, snapshot: Snapshot, any_bits: bool) -> Result<()> {
        let (cursor, mut tensors) = snapshot.of(&self.identity(), any_bits)?;
        self.fill()?;
        let moments = self.config.method.moments();
        let mut best_values = Vec::new();
        for name in &self.names {
            let values = self.parameters.value_mut(name).unwrap_or(&mut []);
            values.copy_from_slice(&tensors.take("value", name, values.len())?);
            let len = values.len();
            if cursor.steps > 0 {
                let kept = (0..moments).map(|i| tensors.take(&format!("moment{i}"), name, len));
                self.optimizer.moments.insert(name.clone(), kept.collect::<Result<_>>()?);
            }
            if cursor.best.is_some() && self.config.keeps_best() {
                best_values.push(tensors.take("best", name, len)?);
            }
        }
        self.optimizer.steps = cursor.steps;
        self.first_step = cursor.first_step;
        self.next = cursor.next;
        self.epoch_loss = cursor.epoch_loss;
        self.last_loss = cursor.last_loss;
        let best = |(step, loss, since)| Best { step, loss, since, values: best_values };
        self.best = cursor.best.map(best);
        self.moved = cursor.moved;
        self.unreported.clear();
        self.is_finite = None;
        let since = self.best.as_ref().map_or(0, |best| best.since);
        self.work = match self.config.patience {
            Some(patience) if since >= patience => Work::EarlyStop,
            _ if cursor.due => Work::HeldOut(Box::new(HeldOut::new(false))),
            _ => Work::Next,
        };
        Ok(())
    }

    pub(super) fn new_snapshot(&self) -> Snapshot {
        Snapshot::new(self.identity(), self.cursor())
    }

    /// Copies the next piece; the event when it was the last.
    pub(super) fn snapshotting(&mut self) -> Option<Event> {
        let Work::Snapshot(mut snapshot, at) = std::mem::replace(&mut self.work, Work::Next) else {
            return None;
        };
        if let Some(at) = self.copy_piece(&mut snapshot, at, false) {
            self.work = Work::Snapshot(snapshot, at);
            return None;
        }
        Some(Event::Checkpoint(snapshot))
    }

    /// The adapter of a run that failed, as it was when it was last known to be good, and the step
    /// it is of: as the last whole step left it or, where a number was not finite, as it is in the
    /// last checkpoint before that step, if there is one. `None` where no step was taken, no adapter
    /// is trained, or there is only one that is known to give what is not finite.
    ///
    /// # Errors
    /// When a checkpoint is not of this run.
    pub fn last_good(
        &mut self,
        checkpoints: Option<&Checkpoints>,
        not_finite: bool,
    ) -> Result<Option<(&Adapter, u64)>> {
        // What the last step came to is what gave such a number. One that broke while it moved
        // parameters has left some of them as they were.
        let halfway = self.is_halfway();
        let earlier = checkpoints.filter(|_| not_finite || halfway);
        match earlier.and_then(|all| all.before(self.steps())) {
            Some(snapshot) => self.restore(snapshot, true)?,
            None if halfway || self.is_finite == Some(false) => return Ok(None),
            None => {}
        }
        let steps = self.steps();
        Ok(self.parameters.adapter.as_ref().filter(|_| steps > 0).map(|adapter| (adapter, steps)))
    }
}

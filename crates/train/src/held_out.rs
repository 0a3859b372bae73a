//! The loss of what is held out, or of the window that proves a run's end, and what a number that is
//! not finite came from.

use std::ops::Deref;
use std::sync::Arc;

use graph::{Search, Stop};
use model::Model;

use crate::gradients::Pass;
use crate::{Error, Example, Goal, Gradients, Parameters, Result, Window};

/// What is evaluated, in its windows.
pub(crate) struct Held {
    pub(crate) examples: Arc<[Example]>,
    windows: Vec<Vec<usize>>,
    /// The weight of all its tokens.
    total: f64,
    /// In words.
    what: &'static str,
}

impl Held {
    /// All that is held out.
    pub(crate) fn new(examples: Arc<[Example]>, windows: Vec<Vec<usize>>) -> Held {
        let total = examples.iter().map(Example::weight).sum();
        Held { examples, windows, total, what: "what is held out" }
    }

    /// The last window of a run.
    pub(crate) fn last(examples: Arc<[Example]>, window: Vec<usize>) -> Held {
        let of = |&i: &usize| examples.get(i).map(Example::weight);
        let total = window.iter().filter_map(of).sum();
        Held { examples, windows: vec![window], total, what: "the last window" }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }

    /// Bytes of the windows.
    pub(crate) fn bytes(&self) -> usize {
        let of = |window: &Vec<usize>| size_of_val(window) + size_of_val(&**window);
        self.windows.iter().map(of).sum()
    }

    pub(crate) fn windows(&self) -> impl Iterator<Item = Window> {
        self.windows.iter().map(|window| Window::of(&self.examples, window))
    }
}

/// An evaluation under way.
pub(crate) struct HeldOut {
    /// After a pass over the data, or between two steps of one.
    pub(crate) whole_epoch: bool,
    window: usize,
    loss: f64,
    pass: Option<Pass>,
    blame: Option<Blame>,
}

impl HeldOut {
    pub(crate) fn new(whole_epoch: bool) -> HeldOut {
        HeldOut { whole_epoch, window: 0, loss: 0.0, pass: None, blame: None }
    }

    /// Goes on until the mean loss of what is evaluated is known, or until `stop` says so, which is
    /// `None`.
    ///
    /// # Errors
    /// A fault, or a loss that is not finite, with what made it so.
    pub(crate) fn advance<M: Deref<Target = Model>>(
        &mut self,
        held: &Held,
        gradients: &mut Gradients<M>,
        parameters: &Parameters,
        steps: u64,
        stop: &dyn Stop,
    ) -> Result<Option<f64>> {
        while let Some(window) = held.windows.get(self.window) {
            let pass = match &mut self.pass {
                Some(pass) => pass,
                none => {
                    let window = Window::of(&held.examples, window);
                    none.insert(gradients.begin(&window, held.total, Goal::Loss, parameters)?)
                }
            };
            if let Some(blame) = &mut self.blame {
                blame.advance(gradients, pass, parameters, stop)?;
                return Ok(None);
            }
            let loss = match gradients.advance(pass, parameters, stop) {
                Ok(true) => gradients.loss(pass),
                Ok(false) => return Ok(None),
                Err(e) => Err(e),
            };
            match loss {
                Ok(loss) => {
                    self.loss += loss;
                    self.pass = None;
                    self.window += 1;
                }
                Err(Error::NotFinite(why)) => {
                    let what = format!("after step {steps}, of {} {why}", held.what);
                    self.blame = Some(Blame::new(what));
                }
                Err(e) => return Err(e),
            }
            if stop.should_stop() {
                return Ok(None);
            }
        }
        Ok(Some(self.loss))
    }
}

/// A search for the first op of a pass whose result is not finite.
pub(crate) struct Blame {
    search: Box<Search>,
    what: String,
}

impl Blame {
    /// `what` says which number is not finite, and where.
    pub(crate) fn new(what: String) -> Blame {
        Blame { search: Box::default(), what }
    }

    /// Goes on until `stop` says so. The pass cannot go on after.
    ///
    /// # Errors
    /// [`Error::NotFinite`] when the search is at its end, naming what it found; or a fault.
    pub(crate) fn advance<M: Deref<Target = Model>>(
        &mut self,
        gradients: &mut Gradients<M>,
        pass: &Pass,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<()> {
        let Some(culprit) = gradients.search(pass, &mut self.search, parameters, stop)? else {
            return Ok(());
        };
        let first = culprit.map_or(String::new(), |culprit| {
            format!("; the first result that is not finite is that of {culprit}")
        });
        Err(Error::NotFinite(format!("{}{first}", self.what)))
    }
}

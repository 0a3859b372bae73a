//! One optimizer step as work that can stop between any two tiles of a graph or any two tensors.

use graph::Stop;
use model::Model;
use std::ops::Deref;

use crate::gradients::Pass;
use crate::{AdamW, Error, Example, Gradients, Parameters, Result, Window};

/// What a step does next.
enum Stage {
    /// Run the window's graph.
    Run,
    /// Add the gradient of this parameter to the sum.
    Collect(usize),
    /// Add the squares of this parameter's gradient to the norm's.
    Norm(usize, f64),
    /// Move this parameter.
    Move { at: usize, norm: f64, factor: f32 },
}

/// A step under way.
pub(crate) struct Step {
    windows: Vec<Window>,
    lr: f32,
    /// Gradients are scaled down to this norm; 0 leaves them.
    clip: f32,
    total: f64,
    loss: f64,
    rows: usize,
    names: Vec<String>,
    sums: Vec<Vec<f32>>,
    buffer: Vec<f32>,
    window: usize,
    pass: Option<Pass>,
    stage: Stage,
}

/// What a finished step says of itself.
#[derive(Copy, Clone, PartialEq, Debug)]
pub(crate) struct Stepped {
    pub(crate) loss: f64,
    pub(crate) norm: f64,
    pub(crate) lr: f32,
    pub(crate) rows: usize,
    /// The weight the loss was divided by.
    pub(crate) total: f64,
}

/// The weight of all tokens of some windows.
pub(crate) fn total_weight(windows: &[Window]) -> f64 {
    windows.iter().map(|w| w.examples.iter().map(Example::weight).sum::<f64>()).sum()
}

impl Step {
    pub(crate) fn new(windows: Vec<Window>, lr: f32, clip: f32, parameters: &Parameters) -> Step {
        Step {
            total: total_weight(&windows),
            windows,
            lr,
            clip,
            loss: 0.0,
            rows: 0,
            names: parameters.names(),
            sums: Vec::new(),
            buffer: Vec::new(),
            window: 0,
            pass: None,
            stage: Stage::Run,
        }
    }

    /// True when some parameters have moved and others have not.
    pub(crate) fn is_moving(&self) -> bool {
        matches!(self.stage, Stage::Move { .. })
    }

    /// Goes on until the step is done, or until `stop` says so, which is `None`.
    ///
    /// # Errors
    /// The refusal, a fault, or a number that is not finite; nothing has moved then.
    pub(crate) fn advance<M: Deref<Target = Model>>(
        &mut self,
        gradients: &mut Gradients<M>,
        parameters: &mut Parameters,
        optimizer: &mut AdamW,
        stop: &dyn Stop,
    ) -> Result<Option<Stepped>> {
        loop {
            match self.stage {
                Stage::Run => {
                    let Some(window) = self.windows.get(self.window) else {
                        return Err(Error::Data("a step has no windows".into()));
                    };
                    let pass = match &mut self.pass {
                        Some(pass) => pass,
                        none => {
                            none.insert(gradients.begin(window, self.total, false, parameters)?)
                        }
                    };
                    if !gradients.advance(pass, parameters, stop)? {
                        return Ok(None);
                    }
                    self.loss += gradients.loss(pass)?;
                    self.rows += pass.rows();
                    self.stage = Stage::Collect(0);
                }
                Stage::Collect(i) if i < self.names.len() => {
                    if let Some(pass) = &self.pass {
                        gradients.gradient(pass, i, &mut self.buffer)?;
                    }
                    match self.sums.get_mut(i) {
                        Some(sum) => sum.iter_mut().zip(&self.buffer).for_each(|(a, b)| *a += b),
                        None => self.sums.push(std::mem::take(&mut self.buffer)),
                    }
                    self.stage = Stage::Collect(i + 1);
                }
                Stage::Collect(_) => {
                    self.pass = None;
                    self.window += 1;
                    let more = self.window < self.windows.len();
                    self.stage = if more { Stage::Run } else { Stage::Norm(0, 0.0) };
                }
                Stage::Norm(i, squares) => match self.sums.get(i) {
                    Some(sum) => {
                        let add = |squares: f64, &g: &f32| squares + f64::from(g) * f64::from(g);
                        self.stage = Stage::Norm(i + 1, sum.iter().fold(squares, add));
                    }
                    None => {
                        let norm = squares.sqrt();
                        let factor = self.scale(norm, parameters, optimizer)?;
                        optimizer.steps += 1;
                        self.stage = Stage::Move { at: 0, norm, factor };
                    }
                },
                Stage::Move { at, norm, factor } => {
                    let (Some(name), Some(sum)) = (self.names.get(at), self.sums.get_mut(at))
                    else {
                        let Step { loss, lr, rows, total, .. } = *self;
                        return Ok(Some(Stepped { loss, norm, lr, rows, total }));
                    };
                    if factor < 1.0 {
                        sum.iter_mut().for_each(|g| *g *= factor);
                    }
                    if let Some(values) = parameters.value_mut(name) {
                        optimizer.update(self.lr, name, values, sum)?;
                    }
                    self.stage = Stage::Move { at: at + 1, norm, factor };
                }
            }
            if stop.should_stop() {
                return Ok(None);
            }
        }
    }

    /// What the gradient is multiplied by; checks all that could fail before anything moves.
    fn scale(&self, norm: f64, parameters: &mut Parameters, optimizer: &AdamW) -> Result<f32> {
        let step = optimizer.steps + 1;
        if !norm.is_finite() {
            return Err(Error::Stopped(format!("step {step}: the gradient's norm is {norm}")));
        }
        for (name, sum) in self.names.iter().zip(&self.sums) {
            let length = parameters.value_mut(name).map_or(0, |v| v.len());
            optimizer.check(name, length, sum.len())?;
        }
        if self.clip <= 0.0 {
            return Ok(1.0);
        }
        Ok((f64::from(self.clip) / (norm + 1e-6)) as f32)
    }
}

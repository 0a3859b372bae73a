//! What a run moves: its names, how long each is, and the values.

use std::collections::BTreeMap;

use graph::Shape;
use model::{Adapter, Model};

use crate::{Error, Result};

/// What a gradient is taken of: an adapter's matrices, and float tensors of the model by name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Parameters {
    /// The adapter, if any.
    pub adapter: Option<Adapter>,
    /// Values of float tensors that are trained or differentiated.
    pub weights: BTreeMap<String, Vec<f32>>,
}

impl Parameters {
    /// The leaf names of everything a gradient is taken of, in order.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for target in self.adapter.iter().flat_map(|a| a.tensors.keys()) {
            names.push(format!("0:{target}.lora_a"));
            names.push(format!("0:{target}.lora_b"));
        }
        names.extend(self.weights.keys().cloned());
        names
    }

    /// The matrices that one of [`Parameters::names`] is of, unless it is a tensor of the model.
    pub(crate) fn pair(&self, name: &str) -> Option<&model::LoraTensor> {
        let (target, _) = name.strip_prefix("0:")?.rsplit_once('.')?;
        self.adapter.as_ref()?.tensors.get(target)
    }

    /// The values of one of [`Parameters::names`], to be moved.
    pub fn value_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        let Some(rest) = name.strip_prefix("0:") else {
            return self.weights.get_mut(name).map(Vec::as_mut_slice);
        };
        let (target, part) = rest.rsplit_once('.')?;
        let pair = self.adapter.as_mut()?.tensors.get_mut(target)?;
        match part {
            "lora_a" => Some(&mut pair.a),
            "lora_b" => Some(&mut pair.b),
            _ => None,
        }
    }

    /// How many numbers each of [`Parameters::names`] has, in that order, also where the values are
    /// not there yet (see [`Adapter::outline`]).
    ///
    /// # Errors
    /// When the model has no such projection or tensor.
    pub(crate) fn lengths(&self, model: &Model) -> Result<Vec<usize>> {
        let mut lengths = Vec::new();
        for (target, pair) in self.adapter.iter().flat_map(|adapter| &adapter.tensors) {
            let of = model.base().projection(target)?;
            for dims in [of.a_shape(pair.rank), of.b_shape(pair.rank)] {
                lengths.push(Shape::new(&dims)?.elements());
            }
        }
        for name in self.weights.keys() {
            let tensor = model.base().tensors.tensor(name);
            let missing = || Error::Setting(format!("the model has no tensor `{name}` to train"));
            lengths.push(tensor.ok_or_else(missing)?.0.elements());
        }
        Ok(lengths)
    }

    /// Numbers whose values are there.
    pub(crate) fn held(&self) -> usize {
        let adapter = self.adapter.as_ref().map_or(0, Adapter::parameters);
        adapter + self.weights.values().map(Vec::len).sum::<usize>()
    }
}

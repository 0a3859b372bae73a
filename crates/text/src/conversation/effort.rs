//! How much may be done for one conversation.

use std::cell::Cell;

use serde_json::Value;

use crate::template::Prepared;
use crate::{ChatTemplate, Error, Message};

/// Steps of the template's engine for one conversation, in all renderings of it and of its parts:
/// some ten seconds. One of 4,000 short messages takes nearly as many.
const MOST: u64 = 160_000_000;

/// Steps that a rendering which fails is taken for, by message; the engine does not tell then.
const FAILED: u64 = 100;

/// What is done for a conversation: steps of the template's engine, of which there is a bound since
/// every answer is found by rendering all before it.
pub struct Effort<'a> {
    pub(super) steps: Cell<u64>,
    pub(super) most: u64,
    pub(super) wanted: &'a dyn Fn() -> bool,
}

impl Default for Effort<'_> {
    /// That of somebody who waits as long as it takes.
    fn default() -> Self {
        Self::new(&|| true)
    }
}

impl<'a> Effort<'a> {
    /// Nothing done so far. `wanted` is asked again and again whether anybody still waits.
    pub fn new(wanted: &'a dyn Fn() -> bool) -> Self {
        Self { steps: Cell::new(0), most: MOST, wanted }
    }

    /// Whether more may be done.
    ///
    /// # Errors
    /// The bound is reached; or nobody waits any more.
    pub fn check(&self) -> Result<(), Error> {
        if self.steps.get() > self.most {
            return Err(Error::Effort {
                what: format!(
                    "to find what the assistant says in it the template takes more than {} steps; \
                     split the conversation",
                    self.most
                ),
            });
        }
        match (self.wanted)() {
            true => Ok(()),
            false => Err(Error::Effort { what: "nobody waits for it any more".into() }),
        }
    }

    /// A rendering of the first `upto` messages, which is counted.
    pub(super) fn render(
        &self,
        template: &ChatTemplate,
        prepared: &Prepared,
        upto: usize,
        generate: bool,
    ) -> Result<String, Error> {
        let rendered = template.render_prepared(prepared, upto, generate);
        let steps = match &rendered {
            Ok((_, steps)) => *steps,
            Err(_) => FAILED * upto as u64,
        };
        self.steps.set(self.steps.get().saturating_add(steps));
        rendered.map(|(text, _)| text)
    }

    /// A rendering of a whole conversation, which is counted.
    pub(super) fn render_new(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        tools: &[Value],
    ) -> Result<String, Error> {
        self.render(template, &Prepared::new(messages, tools)?, messages.len(), false)
    }
}

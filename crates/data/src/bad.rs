//! Why something in the data cannot be used.

use std::fmt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// Stable names for what can be wrong with a row: what a program may match on.
        #[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Reason { $($(#[$doc])* $variant,)* }

        impl Reason {
            /// Every reason, for documentation.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant,)*];

            /// The stable spelling, e.g. `no_assistant_tokens`.
            pub fn as_str(self) -> &'static str {
                match self { $(Reason::$variant => $name,)* }
            }
        }
    };
}

reasons! {
    /// It is no JSON, no record of as many cells as there are columns, no UTF-8, or too large.
    Malformed = "malformed";
    /// No layout has these fields, or several have.
    UnknownLayout = "unknown_layout";
    /// Its layout is not that of the rows before it.
    MixedLayouts = "mixed_layouts";
    /// A field that means nothing here, or something that is not supported.
    UnknownField = "unknown_field";
    /// A field that must be there is not.
    MissingField = "missing_field";
    /// A field is of the wrong type.
    WrongType = "wrong_type";
    /// A field is out of range.
    BadValue = "bad_value";
    /// There is nothing in it, or nothing in an answer that would be trained on.
    Empty = "empty";
    /// No token carries loss.
    NoAssistantTokens = "no_assistant_tokens";
    /// An answer would be cut off by the window.
    TruncatedAnswer = "truncated_answer";
    /// It is longer than the window, though its answers are not cut off.
    TooLong = "too_long";
    /// What the assistant says cannot be found in what the template makes of it.
    AmbiguousTurn = "ambiguous_turn";
    /// The chat template fails or refuses it, or there is none.
    Template = "template";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a row, or one of its fields, cannot be used: one line that says what is wrong, what was
/// expected and what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{what}")]
pub struct Bad {
    /// The kind of fault.
    pub reason: Reason,
    /// The field to blame, such as `messages[1].content`; empty where it is the row as a whole.
    pub field: String,
    /// What is wrong, the field named.
    pub what: String,
}

impl Bad {
    /// A row as a whole.
    pub fn row(reason: Reason, what: impl Into<String>) -> Bad {
        Bad { reason, field: String::new(), what: what.into() }
    }

    /// A field.
    pub fn field(reason: Reason, field: impl Into<String>, what: impl Into<String>) -> Bad {
        Bad { reason, field: field.into(), what: what.into() }
    }
}

//! The kinds of error and the one table of codes.

use std::fmt;

/// The kind of an error; decides the HTTP status and the exit code.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The input is wrong.
    Invalid,
    /// It cannot be done; found before it starts.
    Refusal,
    /// It broke while running.
    Fault,
    /// What was named is not there.
    Missing,
    /// It cannot be done in the state things are in; something else has to end first.
    Conflict,
    /// There is too much to do; try again later.
    Busy,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $kind:ident;)*) => {
        /// Stable error codes: what a program may match on.
        #[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
        pub enum Code { $($(#[$doc])* $variant,)* }

        impl Code {
            /// Every code, for documentation.
            pub const ALL: &'static [Code] = &[$(Code::$variant,)*];

            /// The stable spelling, e.g. `op_not_differentiable`.
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// The kind of error this code belongs to.
            pub fn kind(self) -> Kind {
                match self { $(Code::$variant => Kind::$kind,)* }
            }
        }
    };
}

codes! {
    /// An argument, shape or value is wrong.
    InvalidInput = "invalid_input", Invalid;
    /// A file name or path that is not allowed.
    BadPath = "bad_path", Invalid;
    /// Training data that cannot be used.
    BadData = "bad_data", Invalid;
    /// A safetensors file without its folder, where an adapter was expected.
    AdapterSafetensors = "adapter_safetensors", Invalid;
    /// A pickle of PyTorch, where an adapter was expected.
    AdapterPickle = "adapter_pickle", Invalid;
    /// An adapter for a model of another architecture.
    AdapterArchitecture = "adapter_architecture", Invalid;
    /// An adapter whose matrices are of other shapes than the model's.
    AdapterShape = "adapter_shape", Invalid;
    /// More tokens than the model's context or the cache holds.
    ContextExceeded = "context_length_exceeded", Invalid;
    /// The server was started without a folder for training.
    TrainingOff = "training_off", Invalid;
    /// No model or adapter of this name.
    UnknownModel = "unknown_model", Missing;
    /// A training run is there already.
    RunInProgress = "run_in_progress", Conflict;
    /// No training run that could be controlled, or not under this name.
    NotRunning = "not_running", Conflict;
    /// An adapter has nothing learned that could be promoted or discarded, or is in use.
    AdapterState = "adapter_state", Conflict;
    /// More requests are waiting than the server keeps.
    QueueFull = "queue_full", Busy;
    /// The server is loading its model.
    Loading = "loading", Busy;
    /// The server is stopping.
    Stopping = "stopping", Busy;
    /// An op has no gradient with respect to an operand that needs one.
    OpNotDifferentiable = "op_not_differentiable", Refusal;
    /// The gradient was asked of something no output depends on smoothly.
    NoGradientPath = "no_gradient_path", Refusal;
    /// A gradient rule returned something of the wrong shape, dtype or number.
    BrokenRule = "broken_gradient_rule", Refusal;
    /// No device has a kernel for an op with these operands.
    NoKernel = "no_kernel", Refusal;
    /// The plan needs more memory than is allowed.
    OverBudget = "over_budget", Refusal;
    /// Merging an adapter would change most weights by less than what they are rounded to.
    MergeErases = "merge_erases", Refusal;
    /// A number is not finite.
    NonFinite = "non_finite", Fault;
    /// A training run moved some of its targets not at all.
    DeadAdapters = "dead_adapters", Fault;
    /// An index operand points outside of its tensor.
    IndexOutOfRange = "index_out_of_range", Fault;
    /// A file of a run could not be read or written.
    FileFailed = "file_failed", Fault;
    /// The system refused memory.
    OutOfMemory = "out_of_memory", Fault;
    /// A leaf is not bound, or bound to something of another size.
    BadBinding = "bad_binding", Fault;
    /// A broken assumption inside Gradus, caught and reported.
    Internal = "internal", Fault;
}

impl Code {
    /// The HTTP status a server answers with.
    pub fn http_status(self) -> u16 {
        match self.kind() {
            Kind::Invalid => 400,
            Kind::Missing => 404,
            Kind::Conflict => 409,
            Kind::Refusal => 422,
            Kind::Busy => 429,
            Kind::Fault => 500,
        }
    }

    /// The exit code of a command that fails with this code.
    pub fn exit_code(self) -> u8 {
        match self.kind() {
            Kind::Invalid | Kind::Missing | Kind::Conflict | Kind::Busy => 1,
            Kind::Refusal => 2,
            Kind::Fault => 3,
        }
    }
}

/// The input is wrong: a message naming what, where, and what was expected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Invalid {
    /// One line for people.
    pub message: String,
}

impl Invalid {
    /// An error with a one-line message.
    pub fn new(message: impl Into<String>) -> Invalid {
        Invalid { message: message.into() }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Invalid {}

/// Why something cannot be done, found before it starts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    /// The stable code.
    pub code: Code,
    /// The op's name, e.g. `MatMul`; empty when no op is concerned.
    pub op: String,
    /// The node's name, e.g. `blk.3.ffn_gate`; empty when no node is concerned.
    pub node: String,
    /// The operand's role and name, when one operand is to blame.
    pub operand: Option<String>,
    /// The device, when the refusal is a device's.
    pub device: Option<String>,
    /// One sentence: why, and what to do.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.op.is_empty() {
            write!(f, "{} at node `{}`", self.op, self.node)?;
            if let Some(operand) = &self.operand {
                write!(f, ", operand {operand}")?;
            }
            if let Some(device) = &self.device {
                write!(f, ", on {device}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Refusal {}

/// Something broke while running; the values computed so far must not be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The stable code.
    pub code: Code,
    /// The node that failed; empty when no node is concerned.
    pub node: String,
    /// One sentence.
    pub message: String,
}

impl Fault {
    /// A fault at a node.
    pub fn new(code: Code, node: impl Into<String>, message: impl Into<String>) -> Fault {
        Fault { code, node: node.into(), message: message.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.node.is_empty() {
            write!(f, "at node `{}`: ", self.node)?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}

/// Any error of the engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Error {
    /// The input is wrong.
    Invalid(Invalid),
    /// It cannot be done.
    Refusal(Box<Refusal>),
    /// It broke while running.
    Fault(Fault),
}

impl Error {
    /// The stable code.
    pub fn code(&self) -> Code {
        match self {
            Error::Invalid(_) => Code::InvalidInput,
            Error::Refusal(r) => r.code,
            Error::Fault(f) => f.code,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid(e) => e.fmt(f),
            Error::Refusal(e) => e.fmt(f),
            Error::Fault(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

impl From<Invalid> for Error {
    fn from(e: Invalid) -> Error {
        Error::Invalid(e)
    }
}

impl From<Refusal> for Error {
    fn from(e: Refusal) -> Error {
        Error::Refusal(Box::new(e))
    }
}

impl From<Fault> for Error {
    fn from(e: Fault) -> Error {
        Error::Fault(e)
    }
}

/// The result of anything in the engine that can fail.
pub type Result<T> = std::result::Result<T, Error>;

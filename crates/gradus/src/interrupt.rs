//! Ctrl-C: the first asks the work to end at its next edge, the second ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::SIGINT;
use signal_hook::flag;

use crate::error::INTERRUPTED;

/// Whether Ctrl-C has been pressed.
#[derive(Clone, Default)]
pub struct Interrupt {
    asked: Arc<AtomicBool>,
    idle: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes Ctrl-C over. Where the system does not allow that, Ctrl-C ends the process as it
    /// always does.
    pub fn listen() -> Interrupt {
        let interrupt = Interrupt::default();
        let Interrupt { asked, idle } = &interrupt;
        // In this order: a second press finds `asked` set by the first.
        for end_now in [asked, idle] {
            let _ =
                flag::register_conditional_shutdown(SIGINT, INTERRUPTED.into(), end_now.clone());
        }
        let _ = flag::register(SIGINT, asked.clone());
        interrupt
    }

    /// True once Ctrl-C has been pressed.
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Forgets that Ctrl-C was pressed.
    pub fn forget(&self) {
        self.asked.store(false, Ordering::Relaxed);
    }

    /// While idle, the first press already ends the process.
    pub fn set_idle(&self, idle: bool) {
        self.idle.store(idle, Ordering::Relaxed);
    }
}

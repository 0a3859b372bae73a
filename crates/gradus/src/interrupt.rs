//! Ctrl-C, or SIGTERM for a server: the first asks the work to end at its next edge, the second ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
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
        Interrupt::listen_to(&[SIGINT])
    }

    /// As [`Interrupt::listen`], and SIGTERM counts as Ctrl-C.
    pub fn listen_for_end() -> Interrupt {
        Interrupt::listen_to(&[SIGINT, SIGTERM])
    }

    fn listen_to(signals: &[i32]) -> Interrupt {
        let interrupt = Interrupt::default();
        let Interrupt { asked, idle } = &interrupt;
        for &signal in signals {
            // In this order: a second press finds `asked` set by the first.
            for end_now in [asked, idle] {
                let code = INTERRUPTED.into();
                let _ = flag::register_conditional_shutdown(signal, code, end_now.clone());
            }
            let _ = flag::register(signal, asked.clone());
        }
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

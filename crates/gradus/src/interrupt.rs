//! Ctrl-C, or SIGTERM and SIGHUP for what runs long: the first asks the work to end at its next
//! edge, the second ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
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

    /// As [`Interrupt::listen`], and SIGTERM counts as Ctrl-C. So does SIGHUP, the end of the
    /// terminal, unless the process was started to ignore it, as `nohup` does; it may come twice, of
    /// the system and of the shell, so another never ends the process.
    pub fn listen_for_end() -> Interrupt {
        let interrupt = Interrupt::listen_to(&[SIGINT, SIGTERM]);
        if !hangups_are_ignored() {
            let _ = flag::register(SIGHUP, interrupt.asked.clone());
        }
        interrupt
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

/// Whether the process ignores SIGHUP, as far as that can be told: where there is no
/// `/proc`, its handling stays what it is.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_none_or(|mask| mask & 1 << (SIGHUP - 1) != 0)
}

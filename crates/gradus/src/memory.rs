//! What the operating system says this process takes.

/// Bytes of memory, where the system tells.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Resident now, not backed by a file.
    pub anonymous: Option<u64>,
    /// Resident now, backed by a file: the program itself and mapped models.
    pub mapped: Option<u64>,
    /// The most that was resident since the start, or since [`reset_peak`].
    pub peak: Option<u64>,
}

impl Memory {
    /// The most anonymous memory that was resident since [`reset_peak`], if mapped memory has
    /// not changed since.
    pub fn peak_anonymous(&self) -> Option<u64> {
        Some(self.peak?.saturating_sub(self.mapped?))
    }
}

/// Asks the system. Nothing is known outside of Linux.
pub fn now() -> Memory {
    match std::fs::read_to_string("/proc/self/status") {
        Ok(status) => parse(&status),
        Err(_) => Memory::default(),
    }
}

/// Begins the peak anew, so that what a model's file took while it was loaded is not in it.
pub fn reset_peak() {
    // proc(5): 5 resets the peak resident set size ("high water mark").
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

fn parse(status: &str) -> Memory {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    let mapped = match (field("RssFile:"), field("RssShmem:")) {
        (Some(file), shared) => Some(file + shared.unwrap_or(0)),
        (None, _) => None,
    };
    Memory { anonymous: field("RssAnon:"), mapped, peak: field("VmHWM:") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_fields_of_proc_status() {
        let status = "Name:\tgradus\nVmHWM:\t  204800 kB\nVmRSS:\t  102400 kB\n\
                      RssAnon:\t   81920 kB\nRssFile:\t   20480 kB\nRssShmem:\t       0 kB\n";
        let memory = parse(status);
        assert_eq!(memory.anonymous, Some(80 << 20));
        assert_eq!(memory.mapped, Some(20 << 20));
        assert_eq!(memory.peak, Some(200 << 20));
        assert_eq!(memory.peak_anonymous(), Some(180 << 20));
        assert_eq!(parse("VmHWM: many\nRssAnon: 12"), Memory::default());
    }
}

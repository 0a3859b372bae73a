//! Commands that may not end by themselves.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Whether a command succeeds within a time. What takes longer fails, and is ended with all that it
/// has started: `cargo test` runs tests in programs of their own, which outlive it.
pub fn succeeds(command: &mut Command, limit: Duration) -> Result<bool, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let failed = |e: std::io::Error| format!("{name}: {e}");
    let mut child = command.spawn().map_err(failed)?;
    let start = Instant::now();
    loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => return Ok(status.success()),
            None if start.elapsed() > limit => {
                end(&mut child)?;
                return Ok(false);
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Not by a process group of its own: the end of this program by Ctrl-C would not reach that.
fn end(child: &mut Child) -> Result<(), String> {
    let listed = Command::new("ps").args(["-A", "-o", "pid=", "-o", "ppid="]).output();
    let listed = listed.map_err(|e| format!("cannot run ps: {e}"))?;
    let text = String::from_utf8_lossy(&listed.stdout);
    let pairs: Vec<(u32, u32)> = text
        .lines()
        .filter_map(|line| {
            let mut ids = line.split_whitespace().map(|id| id.parse().ok());
            Some((ids.next()??, ids.next()??))
        })
        .collect();
    let mut ended = vec![child.id()];
    let mut at = 0;
    while let Some(&parent) = ended.get(at) {
        ended.extend(pairs.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| pid));
        at += 1;
    }
    // Some may have ended meanwhile.
    let ids = ended.iter().map(u32::to_string);
    let _ = Command::new("kill").arg("-KILL").args(ids).status();
    child.wait().map(|_| ()).map_err(|e| format!("cannot end {}: {e}", child.id()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::Stdio;

    #[test]
    fn what_is_over_its_time_ends_with_all_that_it_started() {
        let (mut read, write) = std::io::pipe().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sh -c 'sleep 30; echo still there' & wait"]);
        command.stdin(Stdio::null()).stdout(write);
        assert!(!succeeds(&mut command, Duration::from_millis(100)).unwrap());
        drop(command);
        // The pipe has an end when nobody holds it any more.
        let mut said = String::new();
        read.read_to_string(&mut said).unwrap();
        assert_eq!(said, "");
        assert!(succeeds(Command::new("sh").args(["-c", "exit 0"]), Duration::MAX).unwrap());
        assert!(!succeeds(Command::new("sh").args(["-c", "exit 1"]), Duration::MAX).unwrap());
    }
}

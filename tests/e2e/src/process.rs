//! One process of ours or of etcd: started with its output in a file, and never left behind.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::wait;

const TAIL_LINES: usize = 25;
const SAYS_WITHIN: Duration = Duration::from_secs(20);

/// A signal that tests send.
#[derive(Clone, Copy, Debug)]
pub enum Signal {
    Terminate,
    Kill,
    Stop,
    Continue,
}

/// Memory that holds pages of files.
#[derive(Clone, Copy, Debug, Default)]
pub struct MappedBytes {
    pub resident: usize,
    /// What a page is shared out among all processes that map it.
    pub proportional: usize,
}

/// A running process. Dropped, it is killed; in a test that fails, the end of its log is printed.
/// It stays in the test's own process group, so that Ctrl-C ends both.
#[derive(Debug)]
pub struct Process {
    name: String,
    log: PathBuf,
    child: Child,
}

impl Process {
    /// Starts a process whose output goes to `folder/name.log`, behind what is there.
    ///
    /// # Panics
    /// Where it cannot be started.
    pub fn start(name: &str, folder: &Path, command: &mut Command) -> Self {
        let log = folder.join(format!("{name}.log"));
        let open = || {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(&log);
            Stdio::from(file.expect("the test's folder can be written to"))
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(open())
            .stderr(open())
            .spawn()
            .unwrap_or_else(|error| panic!("{name} cannot be started: {error}"));
        Self { name: name.into(), log, child }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Memory of the process that is in RAM now.
    ///
    /// # Panics
    /// Where it does not run.
    pub fn resident_bytes(&self) -> usize {
        let status = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(status).expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.and_then(|kib| kib.parse::<usize>().ok()).expect("VmRSS in kB") << 10
    }

    /// Pages of files whose names end with `suffix`.
    ///
    /// # Panics
    /// Where the process does not run.
    pub fn mapped_bytes(&self, suffix: &str) -> MappedBytes {
        let smaps = format!("/proc/{}/smaps", self.child.id());
        let smaps = std::fs::read_to_string(smaps).expect("the process runs");
        let mut sum = MappedBytes::default();
        let mut counts = false;
        for line in smaps.lines() {
            let Some((key, value)) = line.split_once(':').filter(|(key, _)| !key.contains('-'))
            else {
                counts = line.ends_with(suffix);
                continue;
            };
            let kib = value.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<usize>().ok());
            match (key, kib.filter(|_| counts)) {
                ("Rss", Some(kib)) => sum.resident += kib << 10,
                ("Pss", Some(kib)) => sum.proportional += kib << 10,
                _ => {}
            }
        }
        sum
    }

    /// Where it takes TCP connections that may come from other machines, as the kernel's table has
    /// it: address in hexadecimal, port.
    ///
    /// # Panics
    /// Where it does not run.
    pub fn listens_beyond_loopback(&self) -> Vec<String> {
        const LISTEN: &str = "0A";
        let of = |name: &str| format!("/proc/{}/{name}", self.child.id());
        let files = std::fs::read_dir(of("fd")).expect("the process runs").flatten();
        let files: Vec<_> = files.flat_map(|file| std::fs::read_link(file.path())).collect();
        let is_ours = |inode: &str| {
            let socket = format!("socket:[{inode}]");
            files.iter().any(|file| file.as_os_str() == socket.as_str())
        };
        let mut beyond = Vec::new();
        for (table, loopback) in
            [("net/tcp", "0100007F"), ("net/tcp6", "00000000000000000000000001000000")]
        {
            let table = std::fs::read_to_string(of(table)).unwrap_or_default();
            for line in table.lines().skip(1) {
                let fields: Vec<_> = line.split_whitespace().collect();
                let (address, state, inode) = (fields[1], fields[3], fields[9]);
                if state == LISTEN && !address.starts_with(loopback) && is_ours(inode) {
                    beyond.push(address.to_owned());
                }
            }
        }
        beyond
    }

    /// # Panics
    /// Where the signal cannot be sent.
    pub fn signal(&self, signal: Signal) {
        let name = match signal {
            Signal::Terminate => "TERM",
            Signal::Kill => "KILL",
            Signal::Stop => "STOP",
            Signal::Continue => "CONT",
        };
        let id = self.child.id();
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {id}")]).status();
        assert!(sent.is_ok_and(|status| status.success()), "{} got no SIG{name}", self.name);
    }

    /// `kill -9`, and waits until the process is gone.
    ///
    /// # Panics
    /// Where it is not gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("the process is ours");
        self.child.wait().expect("the process is ours");
    }

    /// Waits for the process's own end.
    ///
    /// # Panics
    /// Where it does not end within `within`.
    pub async fn exit(&mut self, within: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.name);
        wait::until(within, &what, || {
            let ended = self.child.try_wait();
            async move {
                ended.map_err(|error| error.to_string())?.ok_or_else(|| "it runs".to_string())
            }
        })
        .await
    }

    /// Everything that the process has written.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// How often that stands in the log.
    pub fn says(&self, what: &str) -> usize {
        self.log().matches(what).count()
    }

    /// How long after `since` the process says what it had said `before` times.
    ///
    /// # Panics
    /// Where it does not within 20 s.
    pub async fn says_again(&self, what: &str, before: usize, since: Instant) -> Duration {
        while self.says(what) == before {
            assert!(since.elapsed() < SAYS_WITHIN, "{} does not say {what:?}", self.name);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        since.elapsed()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended, and a stopped process is killed all the same.
        let _gone = self.child.kill();
        let _gone = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("--- {} ({} lines)", self.name, lines.len());
            for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
                eprintln!("{line}");
            }
        }
    }
}

//! One writer to a checkpoint folder at a time.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

use super::CheckpointError;
use crate::util::files::open_lock;

const LOCK_FILE: &str = ".lock";

/// Holds a folder's lock file. The operating system releases the lock when the process ends,
/// however it ends, so a lock that can be taken is free whatever the file says; the process id in
/// it is for messages.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    stale_owner: Option<String>,
}

impl Lock {
    pub fn take(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(LOCK_FILE);
        let io = |source| CheckpointError::Io {
            path: path.clone(),
            source,
        };
        let mut file = open_lock(&path).map_err(io)?;
        let locked = file.try_lock();
        // A process id and a host name: whatever is longer was not written here.
        let mut owner = String::new();
        let read = (&mut file).take(1024).read_to_string(&mut owner);
        let owner = match read {
            Ok(_) => owner.trim().to_owned(),
            Err(_) => String::new(),
        };
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(CheckpointError::Locked {
                    dir: dir.to_owned(),
                    owner: if owner.is_empty() {
                        "another process".to_owned()
                    } else {
                        owner
                    },
                });
            }
            Err(TryLockError::Error(source)) => return Err(io(source)),
        }
        let host = rustix::system::uname();
        let own = format!(
            "process {} on {}\n",
            std::process::id(),
            host.nodename().to_string_lossy()
        );
        file.set_len(0).map_err(io)?;
        file.rewind().map_err(io)?;
        file.write_all(own.as_bytes()).map_err(io)?;
        Ok(Lock {
            file,
            stale_owner: (!owner.is_empty()).then_some(owner),
        })
    }

    /// The owner that ended without releasing the lock, if one did.
    pub fn stale_owner(&self) -> Option<&str> {
        self.stale_owner.as_deref()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // An empty file says that its owner ended in good order. The file stays: removing it could
        // take away the lock of a process that has just opened it.
        let _ = self.file.set_len(0);
    }
}

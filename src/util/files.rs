//! Files and folders that appear under their names only when they are complete.
//!
//! Both are made under a temporary name beside their final one, `.NAME.RANDOM.partial`, so that a rename suffices, and
//! are removed when they are dropped before that. A process that is killed leaves the temporary one behind.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use tempfile::{NamedTempFile, TempDir};

/// How temporary names end.
const SUFFIX: &str = ".partial";

/// Bytes that are gathered before they are handed to the operating system.
const BUFFER: usize = 1 << 20;

/// Who may read and write a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Whoever the process' umask allows.
    Umask,
    /// Its owner alone.
    Owner,
}

/// What happens to an existing file of the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Replace,
    /// It stays, and the error's kind is [`ErrorKind::AlreadyExists`].
    Refuse,
}

/// Whether a complete file survives a crash of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Content and name are on disk when the file has its name.
    Synced,
    /// The operating system writes them when it likes: for what can be made again and is checked when it is read.
    Unsynced,
}

/// A file that gets its name when it is complete. Dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub struct AtomicFile {
    out: BufWriter<NamedTempFile>,
}

impl AtomicFile {
    /// Begins the file that will be called `target`; its folder must exist.
    ///
    /// # Errors
    /// When `target` names no file, or its folder cannot be written to.
    pub fn create(target: &Path, access: Access) -> io::Result<Self> {
        let mode = match access {
            Access::Umask => 0o666,
            Access::Owner => 0o600,
        };
        let file = tempfile::Builder::new()
            .prefix(&temporary_prefix(target)?)
            .suffix(SUFFIX)
            .permissions(Permissions::from_mode(mode))
            .tempfile_in(parent_of(target))?;
        Ok(AtomicFile {
            out: BufWriter::with_capacity(BUFFER, file),
        })
    }

    /// Gives the file its name, `target`, in the folder it was begun in. After [`ErrorKind::AlreadyExists`] another
    /// name may be tried.
    ///
    /// # Errors
    /// When the rest of the file cannot be written, or something has the name and is to stay.
    pub fn commit(
        &mut self,
        target: &Path,
        existing: Existing,
        durability: Durability,
    ) -> io::Result<()> {
        self.out.flush()?;
        let file = self.out.get_mut();
        if durability == Durability::Synced {
            file.as_file().sync_all()?;
        }
        match existing {
            Existing::Replace => fs::rename(file.path(), target)?,
            Existing::Refuse => rename_new(file.path(), target)?,
        }
        file.disable_cleanup(true);
        match durability {
            Durability::Synced => sync_dir(parent_of(target)),
            Durability::Unsynced => Ok(()),
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.out.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes a whole file, durably.
///
/// # Errors
/// When it cannot be written, or something has the name and is to stay. Nothing of it is left then.
pub fn write(path: &Path, bytes: &[u8], existing: Existing) -> io::Result<()> {
    let mut file = AtomicFile::create(path, Access::Umask)?;
    file.write_all(bytes)?;
    file.commit(path, existing, Durability::Synced)
}

/// A folder that gets its name when it is complete. Dropped before that, it is removed with all it holds.
#[derive(Debug)]
pub struct AtomicDir {
    dir: TempDir,
}

impl AtomicDir {
    /// Begins the folder that will be called `target`, in a folder that exists.
    ///
    /// # Errors
    /// When `target` names no folder, or its parent cannot be written to.
    pub fn create(target: &Path) -> io::Result<Self> {
        Self::create_as(target, &temporary_prefix(target)?, SUFFIX)
    }

    /// As [`AtomicDir::create`], with a temporary name that begins with `prefix` and ends with `suffix`.
    ///
    /// # Errors
    /// When the folder of `target` cannot be written to.
    pub fn create_as(target: &Path, prefix: &OsStr, suffix: &str) -> io::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix(prefix)
            .suffix(suffix)
            .permissions(Permissions::from_mode(0o777))
            .tempdir_in(parent_of(target))?;
        Ok(AtomicDir { dir })
    }

    /// Where it is until it has its name.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Gives the folder its name and makes the name durable. What the folder holds is for the caller to sync. After
    /// [`ErrorKind::AlreadyExists`] another name may be tried.
    ///
    /// # Errors
    /// When something has the name, or its folder cannot be written to.
    pub fn commit(&mut self, target: &Path) -> io::Result<()> {
        rename_new(self.dir.path(), target)?;
        self.dir.disable_cleanup(true);
        sync_dir(parent_of(target))
    }
}

/// Writes a new file in place and makes its content durable: for the files of an [`AtomicDir`].
///
/// # Errors
/// When it exists or cannot be written, and what `write` fails with.
pub fn write_synced<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<T, E>,
) -> Result<T, E> {
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let mut out = BufWriter::with_capacity(BUFFER, file);
    let result = write(&mut out)?;
    out.flush()?;
    out.get_ref().sync_all()?;
    Ok(result)
}

/// Opens a file to read it. A pipe, a socket or a device is refused: reading one may wait forever, or never end.
///
/// # Errors
/// When it is one of these, or cannot be opened.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = fs::metadata(path)?.file_type();
    let found = if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else {
        return File::open(path);
    };
    Err(io::Error::new(
        ErrorKind::InvalidInput,
        format!("this is {found}; expected a file"),
    ))
}

/// The content of a file, which is opened by [`open`].
///
/// # Errors
/// When it cannot be opened or read.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a file, which is opened by [`open`].
///
/// # Errors
/// When it cannot be opened or read, or is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    io::read_to_string(open(path)?)
}

/// Makes `link` a symbolic link to `to`, in place of what has the name.
///
/// # Errors
/// When the folder cannot be written to, or its file system has no links.
pub fn replace_link(link: &Path, to: &Path) -> io::Result<()> {
    let staged = tempfile::Builder::new()
        .prefix(&temporary_prefix(link)?)
        .suffix(SUFFIX)
        .make_in(parent_of(link), |path| symlink(to, path))?;
    staged.persist(link)?;
    Ok(())
}

/// Opens the file that processes lock, making it if there is none. Locks are released when the file is dropped or the
/// process ends, so the file itself says nothing and stays.
///
/// # Errors
/// When it cannot be opened.
pub fn open_lock(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
}

/// Writes a file into a folder and removes it: whether there is room, and the right to.
///
/// # Errors
/// When it cannot be done.
pub fn check_writable(dir: &Path) -> io::Result<()> {
    let mut probe = tempfile::Builder::new().suffix(SUFFIX).tempfile_in(dir)?;
    probe.write_all(b"x")?;
    probe.as_file().sync_all()?;
    probe.close()
}

/// As [`check_writable`], for a folder that need not be there yet; it is not made.
///
/// # Errors
/// When it cannot be made or written.
pub fn check_can_be_written(dir: &Path) -> io::Result<()> {
    let nearest = dir.ancestors().find(|folder| folder.exists());
    // Of a relative path that is not there, what is left is empty.
    check_writable(nearest.unwrap_or(Path::new(".")))
}

/// Whether a name is temporary: of a file that is being written, or that a killed process left.
pub fn is_partial(path: &Path) -> bool {
    path.extension().is_some_and(|found| *found == SUFFIX[1..])
}

/// Makes the entries of a folder durable.
///
/// # Errors
/// When it cannot be opened or synced.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// The names in a folder, sorted; those that are not UTF-8 are left out.
///
/// # Errors
/// When it cannot be listed.
pub fn sorted_entries(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.extend(entry?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// The folder that holds `path`.
pub fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Bytes that may be written in `dir`, where the file system tells: some (FUSE) report zero blocks.
pub fn free_space(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    (stat.f_blocks > 0).then(|| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether a write failed for want of room: a full device, a quota, or a limit to the size of files.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge
    )
}

/// Renames a file or a folder to a name that nothing has.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
        other => return other.map_err(io::Error::from),
    }
    // A file system that cannot rename without replacing can usually link, which never replaces.
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(error),
        // Nor link, or it is a folder: at most what was made since the look is replaced.
        Err(_) if to.symlink_metadata().is_ok() => Err(ErrorKind::AlreadyExists.into()),
        Err(_) => fs::rename(from, to),
    }
}

fn temporary_prefix(target: &Path) -> io::Result<OsString> {
    let name = target
        .file_name()
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the path has no file name"))?;
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    Ok(prefix)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let mut file = AtomicFile::create(&path, Access::Umask).unwrap();
        file.write_all(b"half").unwrap();
        file.flush().unwrap();
        assert!(!path.exists());
        drop(file);
        assert_eq!(names(dir.path()), Vec::<String>::new());

        write(&path, b"old", Existing::Refuse).unwrap();
        write(&path, b"new", Existing::Replace).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let refused = write(&path, b"other", Existing::Refuse).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn another_name_may_be_tried() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("1"), "kept").unwrap();
        let mut file = AtomicFile::create(&at("1"), Access::Umask).unwrap();
        file.write_all(b"new").unwrap();
        let mut commit = |name| file.commit(&at(name), Existing::Refuse, Durability::Unsynced);
        assert_eq!(commit("1").unwrap_err().kind(), ErrorKind::AlreadyExists);
        commit("2").unwrap();
        assert_eq!(fs::read(at("1")).unwrap(), b"kept");
        assert_eq!(fs::read(at("2")).unwrap(), b"new");
        drop(file);
        assert_eq!(names(dir.path()), ["1", "2"]);
    }

    #[test]
    fn permissions_are_those_of_other_files_unless_the_owner_alone_is_meant() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("plain"), "").unwrap();
        fs::create_dir(at("plain_dir")).unwrap();
        write(&at("shared"), b"", Existing::Refuse).unwrap();
        assert_eq!(mode(&at("shared")), mode(&at("plain")));
        let mut own = AtomicFile::create(&at("own"), Access::Owner).unwrap();
        own.commit(&at("own"), Existing::Refuse, Durability::Unsynced)
            .unwrap();
        assert_eq!(mode(&at("own")), 0o600);
        let mut folder = AtomicDir::create(&at("dir")).unwrap();
        folder.commit(&at("dir")).unwrap();
        assert_eq!(mode(&at("dir")), mode(&at("plain_dir")));
    }

    #[test]
    fn a_folder_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model");
        let mut folder = AtomicDir::create(&target).unwrap();
        fs::write(folder.path().join("a"), "a").unwrap();
        fs::create_dir(&target).unwrap();
        let refused = folder.commit(&target).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
        let other = dir.path().join("model-1");
        folder.commit(&other).unwrap();
        assert_eq!(names(&other), ["a"]);
        drop(AtomicDir::create(&target).unwrap());
        assert_eq!(names(dir.path()), ["model", "model-1"]);
    }

    #[test]
    fn only_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        let refused = |path: &Path| open(path).unwrap_err().to_string();
        assert_eq!(refused(&pipe), "this is a pipe; expected a file");
        let device = Path::new("/dev/zero");
        assert_eq!(refused(device), "this is a device; expected a file");
        let file = dir.path().join("file");
        fs::write(&file, "text").unwrap();
        assert_eq!(read_to_string(&file).unwrap(), "text");
        assert_eq!(read(&file).unwrap(), b"text");
    }

    #[test]
    fn a_link_replaces_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        for to in ["one", "two"] {
            replace_link(&link, Path::new(to)).unwrap();
            assert_eq!(fs::read_link(&link).unwrap(), Path::new(to));
        }
        assert_eq!(names(dir.path()), ["link"]);
    }

    #[test]
    fn a_check_leaves_nothing_and_finds_what_is_no_folder() {
        let dir = tempfile::tempdir().unwrap();
        check_writable(dir.path()).unwrap();
        assert_eq!(names(dir.path()), Vec::<String>::new());
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        check_writable(&file).unwrap_err();
        check_can_be_written(&dir.path().join("a/b")).unwrap();
        check_can_be_written(Path::new("not there/b")).unwrap();
        assert_eq!(names(dir.path()), ["file"]);
        check_can_be_written(&file.join("x")).unwrap_err();
        AtomicFile::create(&file.join("x"), Access::Umask).unwrap_err();
        AtomicFile::create(Path::new("/"), Access::Umask).unwrap_err();
    }
}

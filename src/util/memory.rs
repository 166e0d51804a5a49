//! The memory that is left on this machine.

use std::fs;
use std::path::Path;

/// Bytes that processes like this one may still take: what the system calls available, with the free part of its swap,
/// or what a control group of this process leaves, if that is less. `None` where the system does not tell.
pub fn available() -> Option<u64> {
    let machine = of_machine(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = groups.lines().filter_map(|line| {
        let (_, group) = line.split_once(':')?;
        match group.split_once(':')? {
            ("", path) => of_groups("/sys/fs/cgroup", path, &VERSION_2),
            ("memory", path) => of_groups("/sys/fs/cgroup/memory", path, &VERSION_1),
            _ => None,
        }
    });
    Some(left.fold(machine, u64::min))
}

/// The files of a control group.
struct GroupFiles {
    limit: &'static str,
    usage: &'static str,
    /// The line of `memory.stat` for cached files, which the system drops when memory is short.
    cache: &'static str,
}

const VERSION_2: GroupFiles = GroupFiles {
    limit: "memory.max",
    usage: "memory.current",
    cache: "file",
};

const VERSION_1: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_cache",
};

/// `MemAvailable` and `SwapFree` of `/proc/meminfo`, in bytes.
fn of_machine(meminfo: &str) -> Option<u64> {
    let swap = number_after(meminfo, "SwapFree:").unwrap_or(0);
    Some((number_after(meminfo, "MemAvailable:")? + swap) * 1024)
}

/// The least that the group at `path` and those above it leave. Of a container `path` may be outside of what is
/// mounted; then the root is the container's own group.
fn of_groups(root: &str, path: &str, files: &GroupFiles) -> Option<u64> {
    let root = Path::new(root);
    let path = root.join(path.trim_start_matches('/'));
    let groups = path.ancestors().take_while(|group| group.starts_with(root));
    groups.filter_map(|group| of_group(group, files)).min()
}

fn of_group(group: &Path, files: &GroupFiles) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    // `max` for no limit.
    let limit: u64 = read(files.limit)?.trim().parse().ok()?;
    let usage: u64 = read(files.usage)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let cache = number_after(&stat, files.cache).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(cache)))
}

/// The number of the line that begins with the word `name`.
fn number_after(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_that_of_the_machine_or_of_the_smallest_group() {
        let meminfo = "MemTotal:  100 kB\nMemAvailable:  40 kB\nSwapFree:  2 kB\n";
        assert_eq!(of_machine(meminfo), Some(42 * 1024));
        assert_eq!(of_machine("MemTotal: 100 kB\n"), None);

        let root = tempfile::tempdir().unwrap();
        let write = |group: &str, name: &str, text: &str| {
            let group = root.path().join(group);
            fs::create_dir_all(&group).unwrap();
            fs::write(group.join(name), text).unwrap();
        };
        let left = |path: &str| of_groups(root.path().to_str().unwrap(), path, &VERSION_2);
        assert_eq!(left("/"), None);
        write("a/b", "memory.max", "max\n");
        write("a/b", "memory.current", "900\n");
        assert_eq!(left("/a/b"), None);
        write("a", "memory.max", "1000\n");
        write("a", "memory.current", "900\n");
        write("a", "memory.stat", "anon 500\nfile 300\n");
        assert_eq!(left("/a/b"), Some(400));
        // A path of another mount.
        assert_eq!(left("/x/y"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(available().is_some_and(|bytes| bytes > 1 << 20));
    }
}

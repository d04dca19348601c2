//! Making a ring, and finding out whether one can be had.

use std::io;

use io_uring::{Builder, IoUring, Probe, opcode};

/// What the kernel's io_uring can do here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UringFeatures {
    /// The kernel's release.
    pub kernel: String,
    /// The optional flags of a ring that it takes.
    pub flags: Vec<&'static str>,
}

type Flag = (&'static str, fn(&mut Builder));

/// Flags that save work, in the order in which kernels learnt them. The last needs the second.
const FLAGS: [Flag; 3] = [
    ("COOP_TASKRUN", |builder| _ = builder.setup_coop_taskrun()),
    ("SINGLE_ISSUER", |builder| _ = builder.setup_single_issuer()),
    ("DEFER_TASKRUN", |builder| _ = builder.setup_defer_taskrun()),
];

/// The operations that the engine uses.
const CODES: [(&str, u8); 6] = [
    ("READ", opcode::Read::CODE),
    ("WRITE", opcode::Write::CODE),
    ("READ_FIXED", opcode::ReadFixed::CODE),
    ("WRITE_FIXED", opcode::WriteFixed::CODE),
    ("FSYNC", opcode::Fsync::CODE),
    ("POLL_ADD", opcode::PollAdd::CODE),
];

/// Tries whether this thread can have a ring that does all that the engine needs.
///
/// # Errors
/// The reason in words: the call that failed, and what usually makes it fail.
pub fn probe_io_uring() -> Result<UringFeatures, String> {
    let (_, features) = build(4)?;
    Ok(features)
}

/// Makes a ring of `entries` with as many of the flags as the kernel takes.
pub(super) fn build(entries: u32) -> Result<(IoUring, UringFeatures), String> {
    let mut with = FLAGS.len();
    let ring = loop {
        let mut builder = IoUring::builder();
        // A child process must not see memory that its parent shares with the kernel.
        builder.dontfork();
        FLAGS[..with].iter().for_each(|(_, set)| set(&mut builder));
        match builder.build(entries) {
            Err(err) if err.raw_os_error() == Some(libc::EINVAL) && with > 0 => with -= 1,
            other => break other.map_err(|err| setup_failed(&err))?,
        }
    };
    check(&ring)?;
    let flags = FLAGS[..with].iter().map(|(name, _)| *name).collect();
    Ok((ring, UringFeatures { kernel: kernel(), flags }))
}

fn check(ring: &IoUring) -> Result<(), String> {
    let mut probe = Probe::new();
    let probed = ring.submitter().register_probe(&mut probe);
    probed.map_err(|err| format!("io_uring_register failed: {err}: the kernel is too old"))?;
    if let Some((name, _)) = CODES.iter().find(|(_, code)| !probe.is_supported(*code)) {
        return Err(format!("the kernel's io_uring has no {name}: it is too old"));
    }
    let params = ring.params();
    if !params.is_feature_nodrop() || !params.is_feature_ext_arg() {
        return Err("the kernel's io_uring cannot wait with a timeout: it is too old".into());
    }
    Ok(())
}

fn setup_failed(err: &io::Error) -> String {
    let hint = match err.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "seccomp or kernel.io_uring_disabled forbids it",
        Some(libc::ENOSYS) => "the kernel has no io_uring, or seccomp hides it",
        Some(libc::ENOMEM) => "raise the limit of locked memory (ulimit -l)",
        Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files (ulimit -n)",
        _ => "this kernel does not offer it",
    };
    format!("io_uring_setup failed: {err}: {hint}")
}

fn kernel() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
    release.map_or_else(|_| "unknown kernel".into(), |text| text.trim().to_owned())
}

/// One line on what a ring has.
pub(super) fn describe(
    features: &UringFeatures,
    depth: usize,
    buffers: &io::Result<()>,
    files: &io::Result<()>,
) -> String {
    let kernel = &features.kernel;
    let registered = match (buffers, files) {
        (Ok(()), Ok(())) => "registered buffers and files".to_owned(),
        (Ok(()), Err(err)) => format!("registered buffers; files not ({err})"),
        (Err(err), files) => {
            let files = match files {
                Ok(()) => "registered files".to_owned(),
                Err(err) => format!("files not registered ({err})"),
            };
            let hint = match err.raw_os_error() {
                Some(libc::ENOMEM) => ": raise the limit of locked memory, ulimit -l",
                _ => "",
            };
            format!("{files}; buffers not registered ({err}{hint})")
        }
    };
    format!("io_uring: {kernel}, depth {depth}, {registered}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_words() {
        for (errno, words) in [
            (libc::EPERM, "seccomp or kernel.io_uring_disabled"),
            (libc::ENOSYS, "no io_uring"),
            (libc::ENOMEM, "ulimit -l"),
            (libc::EMFILE, "ulimit -n"),
        ] {
            let text = setup_failed(&io::Error::from_raw_os_error(errno));
            assert!(text.starts_with("io_uring_setup failed: ") && text.contains(words), "{text}");
        }
    }

    #[test]
    fn the_description_says_what_is_not_registered() {
        let features = UringFeatures { kernel: "6.18".into(), flags: Vec::new() };
        let refused = |errno| Err(io::Error::from_raw_os_error(errno));
        let all = describe(&features, 64, &Ok(()), &Ok(()));
        assert_eq!(all, "io_uring: 6.18, depth 64, registered buffers and files");
        let memory = describe(&features, 64, &refused(libc::ENOMEM), &Ok(()));
        assert!(memory.contains("registered files; buffers not") && memory.contains("ulimit -l"));
        let none = describe(&features, 64, &refused(libc::EFAULT), &refused(libc::EMFILE));
        assert!(none.contains("files not registered") && none.contains("buffers not registered"));
        assert!(describe(&features, 64, &Ok(()), &refused(libc::EMFILE)).contains("files not"));
    }
}

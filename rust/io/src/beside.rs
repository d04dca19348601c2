//! Work beside other work.

use parking_lot::Mutex;

/// What `work` makes, on a thread of its own while this one does `meanwhile`.
///
/// # Panics
/// Where `work` does.
pub fn beside<T: Send>(work: impl FnOnce() -> T + Send, meanwhile: impl FnOnce()) -> T {
    let work = Mutex::new(Some(work));
    let take = || work.lock().take().map(|work| work());
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("tkv-open".into());
        let helper = thread.spawn_scoped(scope, take);
        meanwhile();
        let made = match helper.map(|helper| helper.join()) {
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Ok(Ok(made)) => made,
            // Without another thread this one does the work.
            Err(_) => take(),
        };
        made.expect("the work is done once")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_beside_other_work_comes_back() {
        let mut done = false;
        assert_eq!(beside(|| 7, || done = true), 7);
        assert!(done);
        let panics = std::panic::catch_unwind(|| beside(|| panic!("a defect"), || ()));
        assert!(panics.is_err());
    }
}

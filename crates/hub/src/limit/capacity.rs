//! Is there a place? Decides only the count; who takes one, and where it lives, is its holder's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many sessions the node may hold. A place is taken before anything is awaited and given back
/// by a guard, so that no way of ending can lose one. Clones count together.
#[derive(Clone, Debug)]
pub struct Capacity(Arc<Places>);

#[derive(Debug)]
struct Places {
    max: usize,
    taken: AtomicUsize,
}

/// A place taken; dropping it gives it back. Lives where the session lives, not where the
/// handshake does.
#[derive(Debug)]
#[must_use = "dropping a seat gives it back"]
pub struct Seat(Arc<Places>);

impl Capacity {
    /// `max` places, all free.
    pub fn new(max: usize) -> Self {
        Self(Arc::new(Places { max, taken: AtomicUsize::new(0) }))
    }

    /// A place, unless all are taken. Two callers never get the same one.
    pub fn try_acquire(&self) -> Option<Seat> {
        let more = |taken| (taken < self.0.max).then_some(taken + 1);
        self.0.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Seat(self.0.clone()))
    }

    /// Places taken now.
    pub fn n_taken(&self) -> usize {
        self.0.taken.load(Ordering::Acquire)
    }

    /// All places.
    pub fn max(&self) -> usize {
        self.0.max
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_counts_until_it_is_dropped() {
        let capacity = Capacity::new(5);
        let mut seats: Vec<Seat> = (0..5).map(|_| capacity.try_acquire().unwrap()).collect();
        assert!(capacity.try_acquire().is_none());
        assert_eq!(capacity.n_taken(), 5);
        seats.pop();
        let sixth = capacity.try_acquire();
        assert!(sixth.is_some() && capacity.try_acquire().is_none());
        drop(seats);
        drop(sixth);
        assert_eq!(capacity.n_taken(), 0);
        assert!(Capacity::new(0).try_acquire().is_none());
    }

    #[tokio::test]
    async fn seats_of_cancelled_and_panicked_holders_come_back() {
        let capacity = Capacity::new(1_000);
        let mut tasks = Vec::new();
        for i in 0..1_000 {
            let seat = capacity.try_acquire().unwrap();
            tasks.push(tokio::spawn(async move {
                let _seat = seat;
                match i % 3 {
                    0 => {}
                    1 => std::panic::resume_unwind(Box::new("a session's panic")),
                    _ => std::future::pending().await,
                }
            }));
        }
        assert!(capacity.try_acquire().is_none());
        tokio::task::yield_now().await;
        for task in tasks {
            task.abort();
            let _ = task.await;
        }
        assert_eq!(capacity.n_taken(), 0);
        let all: Vec<Seat> = std::iter::from_fn(|| capacity.try_acquire()).collect();
        assert_eq!(all.len(), 1_000);
    }

    #[test]
    fn never_more_than_the_capacity_at_any_instant_from_many_threads() {
        let capacity = Capacity::new(50);
        let inside = AtomicUsize::new(0);
        let most = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let seats: Vec<Seat> = (0..10).filter_map(|_| capacity.try_acquire()).collect();
                        let n = inside.fetch_add(seats.len(), Ordering::SeqCst) + seats.len();
                        most.fetch_max(n, Ordering::SeqCst);
                        inside.fetch_sub(seats.len(), Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 50);
        assert_eq!(capacity.n_taken(), 0);
    }
}

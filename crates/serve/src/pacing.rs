//! How training shares the device with turns that are running.
//!
//! Training has the device alone for a *segment*, between two batches of the serving loop, so a
//! turn is slowed down by exactly the time that segments take. After each batch training is given
//! credit, a fraction of the time the batch took; a segment uses it up, and what it takes beyond
//! (a tile is never cut) is owed and comes off the next. So the bound holds over any stretch of
//! time without being predicted.

use std::time::{Duration, Instant};

use crate::Pacing;

/// Of the slowdown that is allowed, what segments take: a segment also costs what it pushes out
/// of the caches, and single tokens vary around the mean.
const OF_BOUND: f64 = 0.25;

/// Under a bound, a segment waits until it may take what this many batches earn: fewer, longer
/// segments push out less, and most tokens are not late at all.
const SAVED: f64 = 2.0;

/// Evidence about rates fades by `exp(-t / FADE)`.
const FADE: Duration = Duration::from_secs(60);

/// Segments remembered for the quantiles of their lengths.
const REMEMBERED: usize = 1024;

/// A turn of fewer steps says nothing about its rate.
const LEAST_STEPS: usize = 16;

/// What a segment may take.
#[derive(Copy, Clone, PartialEq, Debug)]
pub(crate) enum Allowance {
    /// Until there is something to serve.
    Open,
    /// This long at most.
    For(Duration),
    /// Nothing now.
    Wait,
}

/// Keeps the account of one run.
#[derive(Debug)]
pub(crate) struct Pacer {
    pacing: Pacing,
    /// Seconds that training may take; negative when it took too much.
    credit: f64,
    /// Seconds of credit that a segment waits for.
    least: f64,
    pub(crate) stats: Stats,
}

/// What is measured as a run goes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stats {
    /// Time in segments, while there was something to serve and in all.
    pub(crate) busy_training: Duration,
    pub(crate) training: Duration,
    /// Time in batches since the run began.
    pub(crate) serving: Duration,
    pub(crate) segments: u64,
    pub(crate) busy_segments: u64,
    lengths: Vec<f32>,
    next_length: usize,
    /// Faded sums: seconds of batches, seconds of segments among them, rows decoded.
    recent: [f64; 3],
    faded: Option<Instant>,
}

impl Pacer {
    pub(crate) fn new(pacing: Pacing) -> Pacer {
        Pacer { pacing, credit: 0.0, least: 0.0, stats: Stats::default() }
    }

    /// Seconds of credit for a second of serving.
    fn rate(&self) -> f64 {
        match self.pacing {
            Pacing::Share(ppm) => {
                let share = f64::from(ppm) / 1e6;
                if share >= 1.0 { f64::INFINITY } else { share / (1.0 - share) }
            }
            Pacing::Slowdown(ppm) => {
                let bound = OF_BOUND * f64::from(ppm) / 1e6;
                bound / (1.0 - bound)
            }
            Pacing::Never => f64::INFINITY,
        }
    }

    /// A batch took this long and gave so many tokens.
    pub(crate) fn served(&mut self, took: Duration, tokens: usize, now: Instant) {
        let earned = took.as_secs_f64() * self.rate();
        let saved = if matches!(self.pacing, Pacing::Slowdown(_)) { SAVED } else { 0.0 };
        // No more is saved up: a long segment later would be a gap.
        let most = (saved + 1.0) * earned;
        self.credit = if earned.is_finite() { (self.credit + earned).min(most) } else { 0.0 };
        self.least = saved * earned;
        self.stats.serving += took;
        self.stats.fade(now);
        self.stats.add([took.as_secs_f64(), 0.0, tokens as f64]);
    }

    /// What the next segment may take, while there is something to serve.
    pub(crate) fn allowance(&self, busy: bool) -> Allowance {
        if !busy {
            return Allowance::Open;
        }
        if self.rate().is_infinite() {
            // As long as one segment; the next batch comes in between.
            return Allowance::For(Duration::from_millis(2));
        }
        match self.credit > 0.0 && self.credit >= self.least {
            true => Allowance::For(Duration::from_secs_f64(self.credit)),
            false => Allowance::Wait,
        }
    }

    /// A segment took this long.
    pub(crate) fn trained(&mut self, took: Duration, busy: bool, now: Instant) {
        self.stats.training += took;
        self.stats.segments += 1;
        if busy {
            self.credit -= took.as_secs_f64();
            self.stats.busy_training += took;
            self.stats.busy_segments += 1;
            self.stats.fade(now);
            self.stats.add([0.0, took.as_secs_f64(), 0.0]);
            self.stats.length(took);
        }
    }
}

impl Stats {
    fn fade(&mut self, now: Instant) {
        let since = self.faded.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let factor = (-since.as_secs_f64() / FADE.as_secs_f64()).exp();
        self.recent.iter_mut().for_each(|sum| *sum *= factor);
        self.faded = Some(now);
    }

    fn add(&mut self, what: [f64; 3]) {
        self.recent.iter_mut().zip(what).for_each(|(sum, add)| *sum += add);
    }

    fn length(&mut self, took: Duration) {
        let ms = took.as_secs_f32() * 1e3;
        match self.lengths.get_mut(self.next_length) {
            Some(slot) => *slot = ms,
            None => self.lengths.push(ms),
        }
        self.next_length = (self.next_length + 1) % REMEMBERED;
    }

    /// The length of segments that this share of them stays below, in milliseconds.
    pub(crate) fn quantile(&self, share: f64) -> Option<f32> {
        let mut sorted = self.lengths.clone();
        sorted.sort_by(f32::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        sorted.get((last as f64 * share).round() as usize).copied()
    }

    /// Tokens per second of batches alone, and of batches with the segments between them.
    pub(crate) fn rates(&self) -> Option<(f64, f64)> {
        let [serving, training, tokens] = self.recent;
        (serving > 0.0).then(|| (tokens / serving, tokens / (serving + training)))
    }

    /// By how much turns were slowed down lately, in millionths.
    pub(crate) fn slowdown_ppm(&self) -> Option<u32> {
        let [serving, training, _] = self.recent;
        (serving > 0.0).then(|| (1e6 * training / (serving + training)) as u32)
    }
}

/// What turns say of themselves at their end: how much of their time went into training.
#[derive(Clone, Debug, Default)]
pub(crate) struct Receipts {
    /// Turns that saw no segment, and turns that saw some.
    pub(crate) clean: u64,
    pub(crate) overlapped: u64,
    /// Of the clean ones: steps, and their seconds.
    steps: f64,
    seconds: f64,
    /// Overlapped turns by slowdown in steps of 1 %.
    histogram: Vec<u64>,
    most: f64,
}

impl Receipts {
    /// A turn that took so many steps after its first ended; `training` of its time went into
    /// segments.
    pub(crate) fn turn(&mut self, steps: usize, took: Duration, training: Duration) {
        if steps < LEAST_STEPS || took.is_zero() {
            return;
        }
        if training.is_zero() {
            self.clean += 1;
            self.steps += steps as f64;
            self.seconds += took.as_secs_f64();
            return;
        }
        self.overlapped += 1;
        let slowdown = (training.as_secs_f64() / took.as_secs_f64()).clamp(0.0, 1.0);
        self.most = self.most.max(slowdown);
        self.histogram.resize(101, 0);
        if let Some(bucket) = self.histogram.get_mut((slowdown * 100.0) as usize) {
            *bucket += 1;
        }
    }

    /// Steps per second of turns that saw no training.
    pub(crate) fn clean_rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.steps / self.seconds)
    }

    /// The slowdown that this share of overlapped turns stays at or below, in millionths.
    pub(crate) fn quantile_ppm(&self, share: f64) -> Option<u32> {
        let wanted = (self.overlapped as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let bucket = self.histogram.iter().position(|n| {
            seen += n;
            seen >= wanted
        })?;
        Some((bucket as u32 * 10_000).min(self.most_ppm()?))
    }

    /// The largest slowdown of a turn, in millionths.
    pub(crate) fn most_ppm(&self) -> Option<u32> {
        (self.overlapped > 0).then_some((self.most * 1e6).round() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Serves batches of 7 ms and trains in segments that overshoot what they may by up to a tile.
    fn simulate(pacing: Pacing, tile: f64) -> (f64, f64) {
        let mut pacer = Pacer::new(pacing);
        let (mut training, mut serving, mut longest) = (0.0, 0.0, 0.0f64);
        let now = Instant::now();
        for _ in 0..10_000 {
            pacer.served(7 * MS, 1, now);
            serving += 7.0;
            if let Allowance::For(time) = pacer.allowance(true) {
                let took = (time.as_secs_f64() * 1e3 / tile).ceil().max(1.0) * tile;
                pacer.trained(Duration::from_secs_f64(took / 1e3), true, now);
                training += took;
                longest = longest.max(took);
            }
        }
        (training / (training + serving), longest)
    }

    #[test]
    fn the_share_is_kept_whatever_the_tiles() {
        for share in [50_000, 250_000, 500_000, 900_000] {
            for tile in [0.1, 0.7, 2.0, 12.0] {
                let (found, _) = simulate(Pacing::Share(share), tile);
                let wanted = f64::from(share) / 1e6;
                assert!((found - wanted).abs() < 0.01, "{share} {tile}: {found}");
            }
        }
    }

    #[test]
    fn the_bound_on_the_slowdown_holds_and_is_used() {
        for bound in [20_000, 100_000, 500_000] {
            for tile in [0.05, 0.7, 2.0, 12.0] {
                let (found, _) = simulate(Pacing::Slowdown(bound), tile);
                let most = f64::from(bound) / 1e6;
                assert!(found <= most && found > 0.2 * most, "{bound} {tile}: {found}");
            }
        }
        // With small tiles no token is much later than others.
        let (_, longest) = simulate(Pacing::Slowdown(100_000), 0.05);
        assert!(longest <= 7.0 * 0.08 + 0.05, "{longest}");
    }

    #[test]
    fn nothing_is_saved_up() {
        let mut pacer = Pacer::new(Pacing::Share(500_000));
        for _ in 0..100 {
            pacer.served(10 * MS, 1, Instant::now());
        }
        assert_eq!(pacer.allowance(true), Allowance::For(10 * MS));
        assert_eq!(pacer.allowance(false), Allowance::Open);
        // Time when nothing waits costs nothing.
        pacer.trained(1000 * MS, false, Instant::now());
        assert_eq!(pacer.allowance(true), Allowance::For(10 * MS));
        pacer.trained(30 * MS, true, Instant::now());
        assert_eq!(pacer.allowance(true), Allowance::Wait);
        assert_eq!(pacer.stats.busy_training, 30 * MS);
        assert!(matches!(Pacer::new(Pacing::Never).allowance(true), Allowance::For(_)));
    }

    #[test]
    fn receipts_file_turns_by_what_training_took_of_them() {
        let mut receipts = Receipts::default();
        assert_eq!((receipts.quantile_ppm(0.5), receipts.clean_rate()), (None, None));
        receipts.turn(15, 100 * MS, 50 * MS);
        assert_eq!(receipts.overlapped, 0);
        receipts.turn(20, 200 * MS, Duration::ZERO);
        assert_eq!((receipts.clean, receipts.clean_rate()), (1, Some(100.0)));
        for slowed in [1, 5, 9] {
            receipts.turn(20, 100 * MS, slowed * MS);
        }
        assert_eq!(receipts.overlapped, 3);
        assert_eq!(receipts.quantile_ppm(0.5), Some(50_000));
        assert_eq!(receipts.most_ppm(), Some(90_000));
        assert!(receipts.quantile_ppm(0.95) <= receipts.most_ppm());
    }

    #[test]
    fn rates_are_ratios_of_sums() {
        let mut pacer = Pacer::new(Pacing::Share(500_000));
        let now = Instant::now();
        pacer.served(10 * MS, 1, now);
        pacer.served(30 * MS, 3, now);
        pacer.trained(40 * MS, true, now);
        let (alone, with) = pacer.stats.rates().unwrap();
        assert!((alone - 100.0).abs() < 1e-6 && (with - 50.0).abs() < 1e-6);
        assert_eq!(pacer.stats.slowdown_ppm(), Some(500_000));
        assert_eq!(pacer.stats.quantile(0.5), Some(40.0));
    }
}

//! A curve in bounded memory: however many steps a run has, what is drawn of them stays small.

/// Most points a curve keeps; more than a screen has columns.
const POINTS: usize = 1 << 11;

/// Some consecutive values of a curve as one.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Point {
    /// The step of the first value.
    pub first: u64,
    /// The step of the last value.
    pub last: u64,
    /// The least of them.
    pub min: f64,
    /// The greatest of them.
    pub max: f64,
    sum: f64,
    count: u64,
}

impl Point {
    /// The middle of its steps.
    pub fn step(&self) -> f64 {
        (self.first as f64 + self.last as f64) / 2.0
    }

    /// The mean of its values.
    pub fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    fn join(&mut self, other: &Point) {
        self.last = other.last;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
        self.count += other.count;
    }
}

/// Values over steps, as at most 2,048 points: when there are more, neighbours become one.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    points: Vec<Point>,
    /// Values of a full point.
    per_point: u64,
}

impl Default for Curve {
    fn default() -> Curve {
        Curve { points: Vec::new(), per_point: 1 }
    }
}

impl Curve {
    /// Adds a value. One that is not finite cannot be drawn and is left out.
    pub fn push(&mut self, step: u64, value: f64) {
        if !value.is_finite() {
            return;
        }
        let new = Point { first: step, last: step, min: value, max: value, sum: value, count: 1 };
        match self.points.last_mut() {
            Some(last) if last.count < self.per_point => last.join(&new),
            _ => self.points.push(new),
        }
        if self.points.len() > POINTS {
            self.per_point *= 2;
            let mut halved: Vec<Point> = Vec::with_capacity(self.points.len());
            for point in self.points.drain(..) {
                match halved.last_mut() {
                    Some(last) if last.count + point.count <= self.per_point => last.join(&point),
                    _ => halved.push(point),
                }
            }
            self.points = halved;
        }
    }

    /// Its points, in the order of steps.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// `(step, value)` of an exponential moving average over about a twentieth of the curve.
    ///
    /// Each value is divided by the sum of the weights so far, as TensorBoard and Adam do, so the
    /// curve does not start from 0.
    pub fn smoothed(&self) -> Vec<(f64, f64)> {
        let span = (self.points.len() as f64 / 20.0).max(1.0);
        let share = 2.0 / (span + 1.0);
        let (mut sum, mut weight) = (0.0, 0.0);
        let next = |point: &Point| {
            sum = (1.0 - share) * sum + share * point.mean();
            weight = (1.0 - share) * weight + share;
            (point.step(), sum / weight)
        };
        self.points.iter().map(next).collect()
    }

    /// The curve as a line of `width` characters at most, `▁` its lowest value and `█` its
    /// highest; empty where there is nothing to show.
    ///
    /// ```
    /// let mut curve = runs::Curve::default();
    /// (1..=4).for_each(|step| curve.push(step, 4.0 - step as f64));
    /// assert_eq!(curve.sparkline(60), "█▆▃▁");
    /// ```
    pub fn sparkline(&self, width: usize) -> String {
        const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let per = self.points.len().div_ceil(width.max(1)).max(1);
        let mean = |points: &[Point]| {
            points.iter().map(Point::mean).sum::<f64>() / points.len().max(1) as f64
        };
        let means: Vec<f64> = self.points.chunks(per).map(mean).collect();
        let least = means.iter().copied().fold(f64::INFINITY, f64::min);
        let range = means.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least;
        let bar = |mean: f64| {
            let part = if range > 0.0 { (mean - least) / range } else { 0.0 };
            // A part of 0 to 1; the cast saturates.
            let at = (part * (BARS.len() - 1) as f64).round() as usize;
            BARS.get(at).copied().unwrap_or(' ')
        };
        means.into_iter().map(bar).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(values: impl IntoIterator<Item = f64>) -> Curve {
        let mut curve = Curve::default();
        (1..).zip(values).for_each(|(step, value)| curve.push(step, value));
        curve
    }

    #[test]
    fn a_long_curve_keeps_its_mean_its_extremes_and_its_steps_in_bounded_memory() {
        let n = 100_000u64;
        let long = curve((1..=n).map(|i| if i == 777 { 1e3 } else { i as f64 / n as f64 }));
        let points = long.points();
        assert!((POINTS / 2..=POINTS).contains(&points.len()), "{}", points.len());
        assert_eq!((points[0].first, points[points.len() - 1].last), (1, n));
        assert!(points.windows(2).all(|w| w[0].last + 1 == w[1].first), "a step is lost");
        assert_eq!(points.iter().map(|p| p.count).sum::<u64>(), n);
        let sum: f64 = points.iter().map(|p| p.sum).sum();
        assert!((sum - (n as f64 + 1.0) / 2.0 - 1e3).abs() < 0.1, "{sum}");
        assert_eq!(points.iter().map(|p| p.max).fold(0.0, f64::max), 1e3);
    }

    #[test]
    fn smoothing_begins_at_the_curve_and_follows_it() {
        let flat = curve((0..200).map(|_| 2.5)).smoothed();
        assert!(flat.iter().all(|(_, value)| (value - 2.5).abs() < 1e-12));
        // Alternation of 1 around 3 is damped to a tenth; span 20, so share 2/21.
        let noisy = curve((0..400).map(|i| 3.0 + if i % 2 == 0 { 1.0 } else { -1.0 })).smoothed();
        assert!(noisy[200..].iter().all(|(_, value)| (value - 3.0).abs() < 0.1));
        assert_eq!(curve([7.0]).smoothed(), [(1.0, 7.0)]);
        // Few steps are shown as they are.
        assert_eq!(curve([3.0, 1.0]).smoothed(), [(1.0, 3.0), (2.0, 1.0)]);
    }

    #[test]
    fn a_sparkline_has_its_width_and_its_extremes() {
        assert_eq!(curve([]).sparkline(10), "");
        assert_eq!(curve([1.0, 1.0]).sparkline(10), "▁▁");
        let line = curve((0..1000).map(f64::from)).sparkline(40);
        assert_eq!(line.chars().count(), 40);
        assert!(line.starts_with('▁') && line.ends_with('█'), "{line}");
        assert_eq!(curve([1.0, f64::NAN, 2.0]).sparkline(10), "▁█");
        assert_eq!(curve([1.0, 2.0]).sparkline(0).chars().count(), 1);
    }
}

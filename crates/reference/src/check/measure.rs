//! How two tensors are compared.

/// The share of excused elements above which a case fails.
pub const MOST_EXCUSED: f64 = 0.05;

/// The element of a tensor that disagrees.
#[derive(Clone, PartialEq, Debug)]
pub struct Mismatch {
    /// Its place, counted from 0 in row-major order.
    pub index: usize,
    /// What was computed.
    pub got: f64,
    /// What was expected.
    pub expected: f64,
}

/// What a comparison of one or more tensors found.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Measure {
    /// Elements compared.
    pub compared: usize,
    /// The largest relative error of an element that was not excused.
    pub worst: f64,
    /// Elements whose relative error exceeds the bound, but whose difference does not exceed
    /// the bound times the rms of their tensor.
    pub excused: usize,
    /// Tensors that are zero everywhere on both sides.
    pub zeros: usize,
    /// Tensors in which something is not zero.
    pub nonzero: usize,
    /// The first element that fails, of any tensor.
    pub mismatch: Option<Mismatch>,
    /// A tensor has another length than was expected.
    pub uneven: bool,
}

impl Measure {
    /// Compares a tensor with what is expected, and adds the result to this measure.
    ///
    /// The relative error of an element is `|a-b| / (|a|+|b|)`; two zeros are equal. An element
    /// fails when that exceeds `bound` and `|a-b|` also exceeds `bound` times the root mean
    /// square of the expected tensor, or when either number is not finite.
    pub fn compare(&mut self, got: &[f64], expected: &[f64], bound: f64) {
        self.uneven |= got.len() != expected.len();
        let squares: f64 = expected.iter().map(|x| x * x).sum();
        let rms = (squares / expected.len().max(1) as f64).sqrt();
        let mut all_zero = true;
        for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
            self.compared += 1;
            if got == 0.0 && expected == 0.0 {
                continue;
            }
            all_zero = false;
            let difference = (got - expected).abs();
            let error = difference / (got.abs() + expected.abs());
            // Written so that NaN fails.
            if error <= bound {
                self.worst = self.worst.max(error);
            } else if difference <= bound * rms && rms.is_finite() {
                self.excused += 1;
            } else {
                self.worst = if error.is_nan() { f64::INFINITY } else { self.worst.max(error) };
                self.mismatch.get_or_insert(Mismatch { index, got, expected });
            }
        }
        match all_zero {
            true if got.is_empty() => {}
            true => self.zeros += 1,
            false => self.nonzero += 1,
        }
    }

    /// Why the measured tensors do not agree, in a few words; `None` when they do.
    pub fn verdict(&self, bound: f64) -> Option<String> {
        if self.uneven {
            return Some("another number of elements than expected".into());
        }
        if self.compared == 0 {
            return Some("no element was compared".into());
        }
        if let Some(Mismatch { index, got, expected }) = &self.mismatch {
            return Some(format!(
                "element {index} is {got:e}, expected {expected:e} (worst relative error {:.1e}, \
                 bound {bound:.0e})",
                self.worst
            ));
        }
        if self.excused as f64 > MOST_EXCUSED * self.compared as f64 {
            return Some(format!(
                "{} of {} elements agree only beside the tensor's rms",
                self.excused, self.compared
            ));
        }
        None
    }

    /// Adds another measure to this one.
    pub fn add(&mut self, other: &Measure) {
        self.compared += other.compared;
        self.worst = self.worst.max(other.worst);
        self.excused += other.excused;
        self.zeros += other.zeros;
        self.nonzero += other.nonzero;
        self.uneven |= other.uneven;
        if self.mismatch.is_none() {
            self.mismatch.clone_from(&other.mismatch);
        }
    }
}

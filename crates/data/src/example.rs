//! Weighted sequences, and the windows they share.

/// One sequence to learn from.
#[derive(Clone, PartialEq, Debug)]
pub struct Example {
    /// Its tokens, at least two.
    pub tokens: Vec<u32>,
    /// Per token, the weight of the loss of predicting it; the first token's is never used.
    pub weights: Vec<f32>,
}

impl Example {
    /// How many tokens carry loss.
    pub fn labelled(&self) -> usize {
        self.weights.iter().skip(1).filter(|&&w| w != 0.0).count()
    }

    /// The sum of the weights that count.
    pub fn weight(&self) -> f64 {
        self.weights.iter().skip(1).map(|&w| f64::from(w)).sum()
    }

    /// Rows it takes: the last token is only predicted, never read.
    pub fn rows(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }
}

/// How many of `n` examples are trained on where the last ones, this share of all, are held out:
/// `floor(n (1 - share))`.
pub fn kept(n: usize, share: f64) -> usize {
    // A product such as 10 * 0.2 may fall just short of a whole number.
    let kept = ((n as f64 * (1.0 - share)) + 1e-9).floor() as usize;
    kept.min(n)
}

/// Sequences that go through one graph together. They do not see each other.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Window {
    /// The sequences, one after the other.
    pub examples: Vec<Example>,
    /// The number of each among all there are: what is drawn at random for its rows follows from
    /// it, and not from the window it is in.
    pub numbers: Vec<u32>,
}

impl From<Vec<Example>> for Window {
    /// These sequences, numbered from 0.
    fn from(examples: Vec<Example>) -> Window {
        let numbers = (0..examples.len()).map(number).collect();
        Window { examples, numbers }
    }
}

fn number(index: usize) -> u32 {
    // Of more examples than that some share their numbers, which are of different steps.
    index as u32
}

impl Window {
    /// The examples of these indices, as [`pack`] gives them.
    pub fn of(examples: &[Example], indices: &[usize]) -> Window {
        let chosen = indices.iter().filter_map(|&i| Some((examples.get(i)?.clone(), number(i))));
        let (examples, numbers) = chosen.unzip();
        Window { examples, numbers }
    }

    /// Rows they take: the last token of each is only predicted, never read.
    pub fn rows(&self) -> usize {
        self.examples.iter().map(Example::rows).sum()
    }
}

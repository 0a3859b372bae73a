//! What is dropped looks random, and does not depend on what it should not.
//!
//! Bounds are four standard deviations of what independent draws give; nothing here is random.

use graph::{Dropout, NodeId, Op};

use crate::Cpu;
use crate::testing::{Case, Every, devices, to_floats};

const ROWS: usize = 400;
const COLS: usize = 640;

/// Which mask: `[seed's and step's key, site, the first number of rows]`.
#[derive(Copy, Clone)]
struct Which {
    key: [i32; 2],
    site: u32,
    sequence: i32,
}

const ONE: Which = Which { key: [7, -3], site: 2, sequence: 5 };

/// Rows at these positions of a sequence: `x` dropped out.
fn dropped(case: &mut Case, x: NodeId, p: f32, which: Which, at: std::ops::Range<usize>) -> NodeId {
    let rows: Vec<i32> = at.clone().flat_map(|i| [which.sequence, i as i32]).collect();
    let rows = case.ints("rows", &[at.len(), 2], &rows);
    let key = case.ints("key", &[2], &which.key);
    let op = Op::Dropout(Dropout { p: p.into(), site: which.site });
    case.graph.push(op, &[x, rows, key], "y").unwrap()
}

/// Ones dropped out, on the fastest family.
fn of(p: f32, which: Which) -> Vec<f32> {
    let mut case = Case::new();
    let x = case.floats("x", &[ROWS, COLS], &[1.0; ROWS * COLS]);
    let y = dropped(&mut case, x, p, which, 0..ROWS);
    to_floats(&case.run(&Cpu::new(2, None).unwrap(), &[y]).unwrap()[0])
}

/// How far the number of places where both keep is from what it is of independent masks, in
/// standard deviations.
fn correlation(a: &[f32], b: &[f32], p: f64) -> f64 {
    let n = a.len().min(b.len()) as f64;
    let kept = |x: f32| f64::from(u8::from(x != 0.0)) - (1.0 - p);
    let sum: f64 = a.iter().zip(b).map(|(&a, &b)| kept(a) * kept(b)).sum();
    sum / (n.sqrt() * p * (1.0 - p))
}

#[test]
fn what_is_kept_is_of_the_right_share_mean_and_variance() {
    for p in [0.05f32, 0.1, 0.5, 0.9] {
        let y = of(p, ONE);
        let (n, share) = (y.len() as f64, f64::from(p));
        let scale = (1.0 / (1.0 - share)) as f32;
        assert!(y.iter().all(|&y| y == 0.0 || y == scale), "p {p}");
        let kept = y.iter().filter(|&&y| y != 0.0).count() as f64;
        let deviation = (n * share * (1.0 - share)).sqrt();
        let off = (kept - n * (1.0 - share)) / deviation;
        assert!(off.abs() < 4.0, "p {p}: {off} deviations");
        // Of what a row of ones becomes: mean 1, variance p / (1 - p).
        let mean = y.iter().map(|&y| f64::from(y)).sum::<f64>() / n;
        let variance = y.iter().map(|&y| (f64::from(y) - 1.0).powi(2)).sum::<f64>() / n;
        let expected = share / (1.0 - share);
        assert!((mean - 1.0).abs() < 4.0 * (expected / n).sqrt(), "p {p}: mean {mean}");
        assert!((variance / expected - 1.0).abs() < 0.03, "p {p}: variance {variance}");
        // No row and no column has more than its share of luck.
        for (what, count, of) in [("row", ROWS, COLS), ("column", COLS, ROWS)] {
            let at = |i: usize, j: usize| if of == COLS { i * COLS + j } else { j * COLS + i };
            let lucky = (0..count).map(|i| {
                let kept = (0..of).filter(|&j| y[at(i, j)] != 0.0).count() as f64;
                let deviation = (of as f64 * share * (1.0 - share)).sqrt();
                ((kept - of as f64 * (1.0 - share)) / deviation).powi(2)
            });
            // Chi-squared with as many degrees of freedom as there are.
            let sum: f64 = lucky.sum();
            let off = (sum - count as f64) / (2.0 * count as f64).sqrt();
            assert!(off.abs() < 4.5, "p {p}: the {what}s are {off} deviations from even");
        }
    }
}

#[test]
fn masks_of_steps_sites_sequences_rows_and_columns_are_independent() {
    for p in [0.1f32, 0.5] {
        let one = of(p, ONE);
        assert!(one == of(p, ONE));
        let check = |what: &str, other: &[f32]| {
            let off = correlation(&one, other, f64::from(p));
            assert!(off.abs() < 4.0, "{what}, p {p}: {off} deviations");
        };
        check("the next key", &of(p, Which { key: [8, -3], ..ONE }));
        check("a key with another second half", &of(p, Which { key: [7, -2], ..ONE }));
        check("the next site", &of(p, Which { site: 3, ..ONE }));
        check("the next sequence", &of(p, Which { sequence: 6, ..ONE }));
        for rows in [1, 2, 7] {
            check("rows further on", &one[rows * COLS..]);
        }
        for columns in [1, 2, 3, 4, 15, 16, 17, 32, 48, 63, 64, 65] {
            check("columns further on", &one[columns..]);
        }
    }
}

/// A row's mask follows from its own numbers: alone, among others, in pieces and on any number of
/// threads; and every family draws the same.
#[test]
fn p5_a_rows_mask_is_its_own() {
    let mut all: Option<Vec<u8>> = None;
    let x: Vec<f32> = (0..70 * 150).map(|i| (i % 97) as f32 - 48.0).collect();
    for cpu in devices() {
        let run = |at: std::ops::Range<usize>, stop: usize| {
            let mut case = Case::new();
            let own = &x[at.start * 150..at.end * 150];
            let x = case.floats("x", &[at.len(), 2, 75], own);
            let y = dropped(&mut case, x, 0.3, ONE, at);
            case.run_in_pieces(&cpu, &[y], &Every::new(stop)).unwrap().remove(0)
        };
        let whole = run(0..70, usize::MAX);
        assert!(*all.get_or_insert_with(|| whole.clone()) == whole, "{cpu:?}");
        for (start, len) in [(0, 1), (13, 1), (69, 1), (5, 40), (30, 40)] {
            let part = run(start..start + len, 1);
            assert!(part[..] == whole[start * 600..(start + len) * 600], "{cpu:?}: {start}");
        }
    }
}

/// What is dropped is not read: it may be no number at all.
#[test]
fn what_is_dropped_may_be_nan() {
    for cpu in devices() {
        let mut case = Case::new();
        let kept = of(0.5, ONE);
        let x: Vec<f32> = kept.iter().map(|&k| if k == 0.0 { f32::NAN } else { 3.0 }).collect();
        let x = case.floats("x", &[ROWS, COLS], &x);
        let y = dropped(&mut case, x, 0.5, ONE, 0..ROWS);
        let y = to_floats(&case.run(&cpu, &[y]).unwrap()[0]);
        assert!(y.iter().zip(&kept).all(|(&y, &k)| y == 3.0 * k), "{cpu:?}");
    }
}

//! All mutants of a file in one text: each site asks `crate::mutation::on(N)` which of its
//! mutants, if any, is to run.
//!
//! Operands are evaluated once, whichever mutant is chosen, so a text grows by a few words for
//! each site. Operands of comparisons are taken by reference, since operators borrow them.
//!
//! `cargo mutants` leaves functions alone that are `unsafe`, and what is no operator: the arithmetic
//! of vectors, calls such as `s.fma(a, b, c)`. [`more`] gives the mutants of both.

use std::collections::HashMap;
use std::ops::Range;

use proc_macro2::{LineColumn, Span};
use quote::ToTokens;
use syn::spanned::Spanned;
use syn::visit::Visit;

/// One of cargo-mutants' changes to a file.
#[derive(Clone)]
pub struct Mutant {
    /// What chooses it, from 1.
    pub id: u32,
    /// As cargo-mutants names it.
    pub name: String,
    /// `FnValue`, `BinaryOperator` and so on.
    pub genre: String,
    /// Line from 1 and column from 1 where what is replaced begins.
    pub at: (usize, usize),
    pub replacement: String,
}

/// What an operator is replaced with.
const OPERATORS: &[(&str, &[&str])] = &[
    ("+", &["-", "*"]),
    ("-", &["+", "/"]),
    ("*", &["+", "/"]),
    ("/", &["%", "*"]),
    ("%", &["/", "+"]),
    ("+=", &["-=", "*="]),
    ("-=", &["+=", "/="]),
    ("*=", &["+=", "/="]),
    ("/=", &["%=", "*="]),
    ("==", &["!="]),
    ("!=", &["=="]),
    ("<", &["==", ">", "<="]),
    (">", &["==", "<", ">="]),
    ("<=", &[">"]),
    (">=", &["<"]),
    ("&&", &["||"]),
    ("||", &["&&"]),
];

/// What a vector's arithmetic is replaced with: the method, and how many operands it has.
const VECTORS: &[(&str, usize, &[&str])] = &[
    ("add", 2, &["sub"]),
    ("sub", 2, &["add"]),
    ("mul", 2, &["add", "div"]),
    ("div", 2, &["mul"]),
    ("fma", 3, &["fnma"]),
    ("fnma", 3, &["fma"]),
    ("min", 2, &["max"]),
    ("max", 2, &["min"]),
    ("neg", 1, &["abs"]),
    ("reduce_sum", 1, &["reduce_max"]),
];

/// The mutants of a file that `cargo mutants` does not make: operators of unsafe functions, and
/// the arithmetic of vectors. They are numbered from `id` on.
///
/// # Errors
/// What does not parse.
pub fn more(path: &str, source: &str, id: u32) -> Result<Vec<Mutant>, String> {
    let file = syn::parse_file(source).map_err(|e| e.to_string())?;
    let mut finder = Finder::new(source);
    finder.visit_file(&file);
    let made = finder.more.into_iter().zip(id..).map(|(found, id)| {
        let Found { genre, at, replaced, replacement, function } = found;
        let (line, column) = (at.line, at.column + 1);
        let name =
            format!("{path}:{line}:{column}: replace {replaced} with {replacement} in {function}");
        Mutant {
            id,
            name,
            genre: genre.into(),
            at: (line, column),
            replacement: replacement.into(),
        }
    });
    Ok(made.collect())
}

/// A file with its mutants, and where they are.
pub struct Schemata {
    pub text: String,
    /// Mutants for whose kind or place this module has no text.
    pub unknown: Vec<u32>,
    /// The texts of single mutants, and of whole sites, with whose they are.
    places: Vec<(Range<usize>, Vec<u32>)>,
}

impl Schemata {
    /// The mutants to blame for a compiler's error at some bytes of the text: those of the least
    /// place that holds them, else those inside of them.
    pub fn blamed(&self, error: &Range<usize>) -> Vec<u32> {
        let holds = |p: &Range<usize>| p.start <= error.start && error.end <= p.end;
        let around = self.places.iter().filter(|(p, _)| holds(p)).min_by_key(|(p, _)| p.len());
        let inside = |p: &Range<usize>| error.start <= p.start && p.end <= error.end;
        match around {
            Some((_, ids)) => ids.clone(),
            None => {
                let within = self.places.iter().filter(|(p, _)| inside(p));
                within.flat_map(|(_, ids)| ids).copied().collect()
            }
        }
    }
}

/// Writes `source` with `mutants` in it.
///
/// # Errors
/// What does not parse.
pub fn write(source: &str, mutants: &[Mutant]) -> Result<Schemata, String> {
    let file = syn::parse_file(source).map_err(|e| e.to_string())?;
    let mut finder = Finder::new(source);
    finder.visit_file(&file);
    let lines = finder.lines;
    let found = finder.sites;
    let mut sites: Vec<Site> = Vec::new();
    let mut unknown = Vec::new();
    for mutant in mutants {
        let (line, column) = mutant.at;
        let at = byte(&lines, LineColumn { line, column: column.saturating_sub(1) });
        let kind = match mutant.genre.as_str() {
            "FnValue" => Kind::Body,
            "BinaryOperator" => Kind::Binary,
            "UnaryOperator" => Kind::Unary,
            "MatchArm" => Kind::Arm,
            "MatchArmGuard" => Kind::Guard,
            "Vector" => Kind::Vector,
            _ => Kind::None,
        };
        let Some(site) = found.get(&(kind, at)) else {
            unknown.push(mutant.id);
            continue;
        };
        match sites.iter_mut().find(|s| s.range == site.range && s.guards == site.guards) {
            Some(site) => site.mutants.push(mutant.clone()),
            None => sites.push(Site { mutants: vec![mutant.clone()], ..site.clone() }),
        }
    }
    // What is put between two bytes comes before what begins there, and the outer before the
    // inner: a guard before its own operator.
    sites
        .sort_by_key(|s| (s.range.start, !s.range.is_empty(), usize::MAX - s.range.end, !s.guards));
    let mut out = Writer { source, sites: &sites, text: String::new(), places: Vec::new() };
    out.range(0..source.len());
    Ok(Schemata { text: out.text, unknown, places: out.places })
}

#[derive(Copy, Clone, PartialEq, Eq, Hash)]
enum Kind {
    Body,
    Binary,
    Unary,
    Arm,
    Guard,
    Vector,
    None,
}

/// A place whose text depends on the mutant.
#[derive(Clone)]
struct Site {
    range: Range<usize>,
    /// An operator's operands; a guard.
    operands: Vec<Range<usize>>,
    operator: String,
    /// That it is the guard that an arm has or is given: mutants of both are of one site.
    guards: bool,
    mutants: Vec<Mutant>,
}

struct Finder {
    /// The lines' first bytes, and the bytes of their characters.
    lines: Vec<Vec<usize>>,
    /// By what and where cargo-mutants says that it is.
    sites: HashMap<(Kind, usize), Site>,
    /// The functions that what is visited is in, and whether they are unsafe.
    functions: Vec<(String, bool)>,
    more: Vec<Found>,
}

/// What [`more`] makes a mutant of.
struct Found {
    genre: &'static str,
    at: LineColumn,
    replaced: String,
    replacement: &'static str,
    function: String,
}

fn lines(source: &str) -> Vec<Vec<usize>> {
    let mut start = 0;
    let mut lines = Vec::new();
    for line in source.split_inclusive('\n') {
        let mut bytes: Vec<usize> = line.char_indices().map(|(i, _)| start + i).collect();
        start += line.len();
        bytes.push(start);
        lines.push(bytes);
    }
    lines
}

fn byte(lines: &[Vec<usize>], at: LineColumn) -> usize {
    let line = lines.get(at.line.wrapping_sub(1));
    line.and_then(|line| line.get(at.column)).copied().unwrap_or(usize::MAX)
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|a| {
        let text = a.meta.to_token_stream().to_string();
        text == "test" || text.replace(' ', "").starts_with("cfg(test")
    })
}

impl Finder {
    fn new(source: &str) -> Finder {
        let (sites, functions, more) = (HashMap::new(), Vec::new(), Vec::new());
        Finder { lines: lines(source), sites, functions, more }
    }

    fn found(
        &mut self,
        genre: &'static str,
        at: LineColumn,
        replaced: &str,
        all: &'static [&'static str],
    ) {
        let function = self.functions.last().map_or("", |(name, _)| name.as_str());
        self.more.extend(all.iter().map(|replacement| Found {
            genre,
            at,
            replaced: replaced.into(),
            replacement,
            function: function.into(),
        }));
    }

    /// Visits a function's inside.
    fn inside(&mut self, signature: &syn::Signature, visit: impl FnOnce(&mut Self)) {
        self.functions.push((signature.ident.to_string(), signature.unsafety.is_some()));
        visit(self);
        self.functions.pop();
    }

    fn span(&self, span: Span) -> Range<usize> {
        byte(&self.lines, span.start())..byte(&self.lines, span.end())
    }

    fn site(&mut self, kind: Kind, at: usize, range: Range<usize>, operands: Vec<Range<usize>>) {
        let guards = matches!(kind, Kind::Arm | Kind::Guard);
        let site = Site { range, operands, operator: String::new(), guards, mutants: Vec::new() };
        self.sites.insert((kind, at), site);
    }

    fn body(&mut self, signature: &syn::Signature, block: &syn::Block) {
        // Of an `impl` there is one type, whichever mutant runs.
        let of_one_type = signature.output.to_token_stream().to_string().contains("impl ");
        if let (Some(first), false) = (block.stmts.first(), of_one_type) {
            let at = self.span(first.span()).start;
            let open = self.span(block.brace_token.span.open()).end;
            self.site(Kind::Body, at, open..open, Vec::new());
        }
    }
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if is_test(&item.attrs) {
            return;
        }
        self.body(&item.sig, &item.block);
        self.inside(&item.sig, |finder| syn::visit::visit_item_fn(finder, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.body(&item.sig, &item.block);
        self.inside(&item.sig, |finder| syn::visit::visit_impl_item_fn(finder, item));
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.body(&item.sig, block);
        }
        syn::visit::visit_trait_item_fn(self, item);
    }

    fn visit_expr_binary(&mut self, binary: &'ast syn::ExprBinary) {
        // The `&&` of a chain of `let`s is no operator.
        let chained = |e: &syn::Expr| matches!(e, syn::Expr::Let(_));
        if !chained(&binary.left) && !chained(&binary.right) {
            let operands = [&binary.left, &binary.right].map(|e| self.span(e.span()));
            let op = self.span(binary.op.span());
            self.site(Kind::Binary, op.start, self.span(binary.span()), operands.into());
            if let Some(site) = self.sites.get_mut(&(Kind::Binary, op.start)) {
                site.operator = binary.op.to_token_stream().to_string();
            }
            let text = binary.op.to_token_stream().to_string();
            let known = OPERATORS.iter().find(|(operator, _)| *operator == text);
            if let (Some((_, all)), Some((_, true))) = (known, self.functions.last()) {
                self.found("BinaryOperator", binary.op.span().start(), &text, all);
            }
        }
        syn::visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let (method, simd) = (call.method.to_string(), call.receiver.to_token_stream().to_string());
        let known = VECTORS.iter().find(|(name, n, _)| *name == method && *n == call.args.len());
        if let (Some((_, _, all)), true) = (known, simd == "s") {
            let operands = call.args.iter().map(|e| self.span(e.span())).collect();
            let at = call.method.span().start();
            let place = self.span(call.method.span()).start;
            self.site(Kind::Vector, place, self.span(call.span()), operands);
            if let Some(site) = self.sites.get_mut(&(Kind::Vector, place)) {
                site.operator = method.clone();
            }
            self.found("Vector", at, &method, all);
        }
        syn::visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_unary(&mut self, unary: &'ast syn::ExprUnary) {
        let op = self.span(unary.op.span());
        let operand = self.span(unary.expr.span());
        self.site(Kind::Unary, op.start, self.span(unary.span()), vec![operand]);
        if let Some(site) = self.sites.get_mut(&(Kind::Unary, op.start)) {
            site.operator = unary.op.to_token_stream().to_string();
        }
        syn::visit::visit_expr_unary(self, unary);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        let (range, operands) = match &arm.guard {
            Some((_, guard)) => {
                let guard = self.span(guard.span());
                self.site(Kind::Guard, guard.start, guard.clone(), vec![guard.clone()]);
                (guard.clone(), vec![guard])
            }
            None => {
                let end = self.span(arm.pat.span()).end;
                (end..end, Vec::new())
            }
        };
        self.site(Kind::Arm, self.span(arm.span()).start, range, operands);
        syn::visit::visit_arm(self, arm);
    }
}

struct Writer<'a> {
    source: &'a str,
    sites: &'a [Site],
    text: String,
    places: Vec<(Range<usize>, Vec<u32>)>,
}

impl Writer<'_> {
    fn put(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// The text of one mutant.
    fn only(&mut self, mutant: &Mutant, text: &str) {
        let start = self.text.len();
        self.put(text);
        self.places.push((start..self.text.len(), vec![mutant.id]));
    }

    /// The source's bytes, with the sites among them.
    fn range(&mut self, range: Range<usize>) {
        self.without(range, None);
    }

    /// The source's bytes, with the sites among them but for one.
    fn without(&mut self, range: Range<usize>, but: Option<&Site>) {
        let sites = self.sites;
        let mut at = range.start;
        for site in sites {
            let inside = site.range.start >= at && site.range.end <= range.end;
            if inside && but.is_none_or(|but| !std::ptr::eq(but, site)) {
                self.put(&self.source[at..site.range.start]);
                let start = self.text.len();
                self.site(site);
                let ids = site.mutants.iter().map(|m| m.id).collect();
                self.places.push((start..self.text.len(), ids));
                at = site.range.end;
            }
        }
        self.put(&self.source[at..range.end]);
    }

    fn site(&mut self, site: &Site) {
        match (site.mutants.first().map(|m| m.genre.as_str()), site.operands.as_slice()) {
            (Some("FnValue"), _) => {
                for m in &site.mutants {
                    self.put(&format!(" if crate::mutation::on({}) {{ return ", m.id));
                    self.only(m, &m.replacement);
                    self.put("; } ");
                }
            }
            (Some("UnaryOperator"), [operand]) => {
                self.put("(match (");
                self.range(operand.clone());
                self.put(") { v_ => ");
                self.choice(site, |m| format!("{} v_", m.replacement), &site.operator);
                self.put(" v_ } })");
            }
            (Some("BinaryOperator"), [left, right]) => self.binary(site, left, right),
            (Some("Vector"), operands) => {
                let names: String = (0..operands.len()).map(|i| format!("v{i}_, ")).collect();
                self.put("(match (");
                for operand in operands {
                    self.range(operand.clone());
                    self.put(", ");
                }
                self.put(&format!(") {{ ({names}) => "));
                let call = |method: &str| format!("s.{method}({names})");
                self.choice(site, |m| call(&m.replacement), &call(&site.operator));
                self.put(" } })");
            }
            (_, guard) => {
                if guard.is_empty() {
                    self.put(" if ");
                }
                self.put("(true");
                let mut always = String::new();
                for m in &site.mutants {
                    match m.replacement.as_str() {
                        "true" => always = format!("crate::mutation::on({}) || ", m.id),
                        _ => self.put(&format!(" && !crate::mutation::on({})", m.id)),
                    }
                }
                if let [guard] = guard {
                    self.put(&format!(" && ({always}"));
                    self.without(guard.clone(), Some(site));
                    self.put(")");
                }
                self.put(")");
            }
        }
    }

    /// `if .. { a mutant } else .. { operator`: what is left is the operands and `}`.
    fn choice(&mut self, site: &Site, text: impl Fn(&Mutant) -> String, operator: &str) {
        for m in &site.mutants {
            self.put(&format!("if crate::mutation::on({}) {{ ", m.id));
            self.only(m, &text(m));
            self.put(" } else ");
        }
        self.put("{ ");
        self.put(operator);
    }

    fn binary(&mut self, site: &Site, left: &Range<usize>, right: &Range<usize>) {
        let op = site.operator.as_str();
        match op {
            "&&" | "||" => {
                // `l && r` is `if l { r } else { l }`, `l || r` the other way round.
                let ids = site.mutants.iter().map(|m| m.id.to_string());
                let id = ids.collect::<Vec<_>>().join(") ^ crate::mutation::on(");
                let name = format!("l{}_", site.range.start);
                self.put(&format!("({{ let {name}: bool = "));
                self.range(left.clone());
                self.put(&format!("; if {name} ^ crate::mutation::on({id}) "));
                let rest = |out: &mut Self| {
                    out.put("{ ");
                    out.range(right.clone());
                    out.put(" }");
                };
                match op {
                    "&&" => {
                        rest(self);
                        self.put(&format!(" else {{ {name} }} }})"));
                    }
                    _ => {
                        self.put(&format!("{{ {name} }} else "));
                        rest(self);
                        self.put(" })");
                    }
                }
            }
            "==" | "!=" | "<" | "<=" | ">" | ">=" => {
                self.operands(left, right, "&");
                self.choice(site, |m| format!("*l_ {} *r_", m.replacement), "");
                self.put(&format!("*l_ {op} *r_ }} }})"));
            }
            _ if op.ends_with('=') => {
                self.put("(match (");
                self.range(right.clone());
                self.put(") { r_ => ");
                for m in &site.mutants {
                    self.put(&format!("if crate::mutation::on({}) {{ ", m.id));
                    let start = self.text.len();
                    self.range(left.clone());
                    self.put(&format!(" {} r_", m.replacement));
                    self.places.push((start..self.text.len(), vec![m.id]));
                    self.put(" } else ");
                }
                self.put("{ ");
                self.range(left.clone());
                self.put(&format!(" {op} r_ }} }})"));
            }
            _ => {
                self.operands(left, right, "");
                self.choice(site, |m| format!("l_ {} r_", m.replacement), "");
                self.put(&format!("l_ {op} r_ }} }})"));
            }
        }
    }

    fn operands(&mut self, left: &Range<usize>, right: &Range<usize>, by: &str) {
        self.put(&format!("(match ({by}("));
        self.range(left.clone());
        self.put(&format!("), {by}("));
        self.range(right.clone());
        self.put(")) { (l_, r_) => ");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
unsafe fn descend<S: Simd>(s: S, n: usize, x: S::F32) -> S::F32 {
    let y = s.mul(s.add(x, x), s.splat(1.0 / n as f32));
    s.fma(y, y, s.neg(x))
}
fn safe(s: S, n: usize) -> f32 {
    s.reduce_sum(x) / (n + 1) as f32
}
#[cfg(test)]
mod tests {
    unsafe fn none(s: S, n: usize) -> usize { s.neg(n) + 1 }
}
";

    /// Operators of safe functions are left to `cargo mutants`; tests have no mutants.
    #[test]
    fn operators_of_unsafe_functions_and_arithmetic_of_vectors_have_mutants() {
        let more = more("a.rs", SOURCE, 7).unwrap();
        let names: Vec<&str> = more.iter().map(|m| m.name.as_str()).collect();
        let expected = [
            "a.rs:2:15: replace mul with add in descend",
            "a.rs:2:15: replace mul with div in descend",
            "a.rs:2:21: replace add with sub in descend",
            "a.rs:2:44: replace / with % in descend",
            "a.rs:2:44: replace / with * in descend",
            "a.rs:3:7: replace fma with fnma in descend",
            "a.rs:3:19: replace neg with abs in descend",
            "a.rs:6:7: replace reduce_sum with reduce_max in safe",
        ];
        assert_eq!(names, expected);
        assert_eq!(more.iter().map(|m| m.id).collect::<Vec<_>>(), (7..15).collect::<Vec<_>>());
    }

    #[test]
    fn all_of_them_are_in_one_text() {
        let made = write(SOURCE, &more("a.rs", SOURCE, 1).unwrap()).unwrap();
        assert!(made.unknown.is_empty());
        syn::parse_file(&made.text).unwrap();
        for text in [
            "crate::mutation::on(1) { s.add(v0_, v1_, ) } else if crate::mutation::on(2) { s.div(",
            "crate::mutation::on(6) { s.fnma(v0_, v1_, v2_, ) } else { s.fma(v0_, v1_, v2_, ) }",
            "crate::mutation::on(4) { l_ % r_ } else if crate::mutation::on(5) { l_ * r_ } else",
        ] {
            assert!(made.text.contains(text), "{text} in {}", made.text);
        }
    }
}

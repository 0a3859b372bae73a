//! The cache alone, against what it should hold: every position's key and every state is a number
//! made of all tokens before it and the adapter, so that a byte in a wrong place shows.

use super::*;
use testkit::Random;

fn geometry(states: bool) -> Geometry {
    Geometry {
        layers: 2,
        draft_layers: 0,
        width: 2,
        vocab: 4,
        context: 1024,
        kv_heads: 1,
        key_width: 2,
        value_width: 4,
        attention_layers: vec![1],
        states: if states { vec![Shape::new(&[2]).unwrap()] } else { Vec::new() },
    }
}

/// What is at the end of some tokens run with an adapter.
fn mark(tokens: &[u32], adapter: Option<AdapterId>) -> u64 {
    let start = adapter.map_or(1, |id| id.0 + 2);
    tokens.iter().fold(start, |mark, &t| Random::new(mark ^ u64::from(t)).bits())
}

fn read(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

/// Runs new tokens as an engine does, its runs cut at random. False when the cache is full.
fn run(
    cache: &mut Cache,
    id: SeqId,
    tokens: &[u32],
    adapter: Option<AdapterId>,
    random: &mut Random,
) -> bool {
    let can = cache.check_room(&[(id, tokens.len())]).is_ok();
    let before = (cache.len(id), cache.free_pages(), cache.free_slots());
    match cache.reserve(&[(id, tokens.len())]) {
        Err(Error::Full { .. }) => {
            assert!(!can);
            assert_eq!(before, (cache.len(id), cache.free_pages(), cache.free_slots()));
            return false;
        }
        other => other.unwrap(),
    }
    assert!(can);
    let mut rest = tokens;
    while !rest.is_empty() {
        cache.ready(id).unwrap();
        let take = cache.until_kept(id, 1 + random.below(rest.len()));
        let (now, later) = rest.split_at(take);
        let mut all = cache.tokens(id).to_vec();
        if cache.slot_count > 0 {
            // The run reads the state it should.
            let Leaf::Host(state) = cache.state_leaf(0, Some(cache.slot(id))) else { panic!() };
            let expected = if all.is_empty() { 0 } else { mark(&all, adapter) };
            assert_eq!(read(state), expected, "the entry state at {}", all.len());
        }
        let mut at = 0;
        for (row, count) in cache.runs(id, now.len()) {
            for i in 0..count {
                all.push(now[at]);
                at += 1;
                let value = mark(&all, adapter);
                cache.rows_mut(0, false, row + i, 1).copy_from_slice(&value.to_le_bytes());
                cache.rows_mut(0, true, row + i, 1)[..8].copy_from_slice(&value.to_le_bytes());
            }
        }
        assert_eq!(at, now.len(), "every new position has a place");
        let value = mark(&all, adapter);
        if cache.slot_count > 0 {
            cache.next_state(id, 0).copy_from_slice(&value.to_le_bytes());
        }
        cache.advance(id, now, adapter);
        rest = later;
    }
    true
}

/// Every position and state of every sequence is what it should be, and everything is counted.
fn check(cache: &Cache, open: &[(SeqId, Option<AdapterId>)]) {
    let (mut pages, mut slots) = (vec![0; cache.page_count], vec![0; cache.slot_count]);
    for &(id, adapter) in open {
        let s = &cache.sequences[&id];
        for at in 0..s.len() {
            let row = s.pages[at / PAGE] as usize * PAGE + at % PAGE;
            let expected = mark(&s.tokens[..at + 1], adapter);
            let (k, v) = &cache.layers[0];
            assert_eq!(read(k.rows(row, 1)), expected, "the key at {at} of {}", s.len());
            assert_eq!(read(&v.rows(row, 1)[..8]), expected, "the value at {at}");
        }
        if let Some(slot) = s.state.filter(|_| s.len() > 0) {
            let expected = mark(&s.tokens, adapter);
            assert_eq!(read(cache.states[0].rows(slot as usize, 1)), expected);
        }
        s.pages.iter().for_each(|&p| pages[p as usize] += 1);
        s.state.iter().for_each(|&p| slots[p as usize] += 1);
        s.next.iter().filter(|_| s.next != s.state).for_each(|&p| slots[p as usize] += 1);
    }
    for (places, users, kept) in [
        (&cache.pages, &pages, Box::new(|n: &index::Node| Some(n.page)) as Box<dyn Fn(_) -> _>),
        (&cache.slots, &slots, Box::new(|n: &index::Node| n.state)),
    ] {
        let mut held = vec![0; users.len()];
        cache.index.all().filter_map(kept).for_each(|p| held[p as usize] += 1);
        let mut available = 0;
        for (p, (&users, &held)) in (0u32..).zip(users.iter().zip(&held)) {
            assert!(held <= 1, "place {p} is kept {held} times");
            assert_eq!(places.users(p), users, "users of place {p}");
            assert_eq!(places.is_shared(p), users > 1 || held == 1, "place {p}");
            available += usize::from(users == 0);
        }
        assert_eq!(places.available(), available);
    }
}

#[test]
fn random_use_keeps_every_byte_in_its_place() {
    let (mut reused, mut full, mut cut) = (0, 0, 0);
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let slots = 1 + random.below(5);
        let geometry = geometry(seed % 3 > 0);
        let mut cache =
            Cache::new(&geometry, DType::F32, (2 + random.below(12)) * PAGE, slots).unwrap();
        let adapters = [None, Some(AdapterId(0)), Some(AdapterId(1))];
        let mut open: Vec<(SeqId, Option<AdapterId>)> = Vec::new();
        // Few different pages, so that sequences begin alike.
        let text = |random: &mut Random| {
            let mut tokens: Vec<u32> = Vec::new();
            for _ in 0..random.below(5) {
                tokens.extend([random.below(2) as u32; PAGE]);
            }
            tokens.extend(std::iter::repeat_n(3, random.below(PAGE + 3)));
            tokens
        };
        for _ in 0..400 {
            let which = random.below(open.len().max(1));
            match (random.below(10), open.get(which).copied()) {
                (0..3, _) | (_, None) => {
                    let adapter = adapters[random.below(3)];
                    let tokens = text(&mut random);
                    let (id, held) = cache.open_prefix(&tokens, adapter);
                    assert!(held == 0 || held < tokens.len());
                    assert_eq!(cache.tokens(id), &tokens[..held]);
                    reused += usize::from(held > 0);
                    open.push((id, adapter));
                    full +=
                        usize::from(!run(&mut cache, id, &tokens[held..], adapter, &mut random));
                }
                (3..6, Some((id, adapter))) => {
                    let tokens = text(&mut random);
                    full += usize::from(!run(&mut cache, id, &tokens, adapter, &mut random));
                }
                (6, Some((id, _))) => {
                    let len = random.below(cache.len(id) + 2);
                    let held = cache.truncate(id, len);
                    assert!(held <= len && held == cache.len(id));
                    assert!(cache.slot_count > 0 || held == len.min(cache.len(id)));
                    cut += 1;
                }
                (7, _) if random.below(4) == 0 => cache.forget(AdapterId(0)),
                (_, Some((id, _))) => {
                    cache.close(id);
                    open.remove(which);
                }
            }
            check(&cache, &open);
        }
        open.drain(..).for_each(|(id, _)| cache.close(id));
        check(&cache, &open);
        assert_eq!(cache.free_pages(), cache.page_count);
        assert_eq!(cache.free_slots(), cache.slot_count);
    }
    assert!(reused > 500 && full > 500 && cut > 500, "{reused} reused, {full} full, {cut} cut");
}

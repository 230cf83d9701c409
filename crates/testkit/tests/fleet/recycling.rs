//! Hours in which nothing happens but that sessions grow old, and crowds that must not come back as
//! crowds.

use hub::close::CloseReason;
use tidegate_testkit::fleet::{Balancing, Fleet, FleetConfig, peak};
use tokio::time::Instant;

use crate::{AGES, Figures, s};

#[tokio::test(start_paused = true)]
async fn a_mass_reconnect_of_5_000_has_no_echo_in_four_hours_of_recycling() {
    let config = FleetConfig { max_age: Some(AGES), ..FleetConfig::new(31, Balancing::LeastConnections) };
    let mut fleet = Fleet::standing(config, &[1_000; 5]).await;
    fleet.run(s(15 * 60)).await;
    let cut = Instant::now();
    fleet.cut(1.0);
    fleet.run(s(4 * 3600)).await;
    let recycled = fleet.record.closed(CloseReason::Recycle, cut);
    let mean = recycled.len() as f64 / cut.elapsed().as_secs_f64();
    let most = peak(&recycled, s(60));
    println!(
        "4 h after a mass reconnect of 5,000: {} recycled, {mean:.2}/s, at most {most:.2}/s in 60 s",
        recycled.len()
    );
    assert!(most <= 1.6 * mean, "{most}/s of {mean}/s");
    let by_age = fleet.record.closes.iter().filter(|close| close.at > cut && close.reason == CloseReason::Recycle);
    assert!(by_age.count() > 5 * 5_000);
    assert_eq!(fleet.record.closed(CloseReason::Shed, cut).len(), 0);
    assert_eq!(fleet.heard().await.n_gaps, 0);
}

/// 10,000 sessions on five even nodes that recycle for an hour.
async fn an_hour(balancing: Balancing, seed: u64) {
    let config = FleetConfig { max_age: Some(AGES), ..FleetConfig::new(seed, balancing) };
    let mut fleet = Fleet::standing(config, &[2_000; 5]).await;
    let from = Instant::now();
    fleet.run(s(3_600)).await;
    let worst = fleet.record.looks.iter().map(|look| look.worst).fold(0.0, f64::max);
    println!(
        "an hour of recycling, {}: {} closes, at most {worst:.3} off",
        balancing.word(),
        fleet.record.closes.len()
    );
    assert_eq!(Figures::since(from, &fleet, balancing.word()).n_shed, 0);
    assert!(fleet.record.closed(CloseReason::Recycle, from).len() > 10_000);
    assert_eq!(fleet.record.refusals.len(), 0);
    assert_eq!(fleet.heard().await.n_gaps, 0);
}

#[tokio::test(start_paused = true)]
async fn an_even_fleet_sheds_nobody_in_an_hour_behind_least_connections() {
    an_hour(Balancing::LeastConnections, 32).await;
}

#[tokio::test(start_paused = true)]
async fn an_even_fleet_sheds_nobody_in_an_hour_behind_two_choices() {
    an_hour(Balancing::TwoChoices, 33).await;
}

#[tokio::test(start_paused = true)]
async fn an_even_fleet_sheds_nobody_in_an_hour_in_turn() {
    an_hour(Balancing::InTurn, 34).await;
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_tokens_with_one_end_are_spread_over_a_fifth_of_their_life() {
    let mut fleet = Fleet::new(FleetConfig::new(35, Balancing::LeastConnections));
    let life = s(3_600);
    fleet.tokens_end_in(Some(life));
    for _ in 0..5 {
        let node = fleet.add();
        fleet.fill(node, 2_000);
    }
    fleet.tokens_end_in(None);
    let from = Instant::now();
    fleet.run(life + s(30)).await;
    let ended = fleet.record.closed(CloseReason::TokenExpired, from);
    assert_eq!((ended.len(), fleet.record.closes.len()), (10_000, 10_000));
    let span = *ended.last().unwrap() - ended[0];
    let (most, even) = (peak(&ended, s(60)), 10_000.0 / (0.2 * life.as_secs_f64()));
    println!("10,000 tokens with one end: over {span:?}, at most {most:.1}/s in 60 s, {even:.1}/s if even");
    assert!(ended[0] >= from + life.mul_f64(0.8) && *ended.last().unwrap() <= from + life + s(1));
    assert!(span.as_secs_f64() >= 0.99 * 0.2 * life.as_secs_f64());
    assert!(most <= 1.3 * even);
    assert!(peak(&fleet.record.returns_after(from), s(60)) <= 1.3 * even, "they come back as flat");
    assert_eq!(fleet.record.refusals.len(), 0);
}

//! Look-ups in flight.

use std::time::Duration;

use tokio::net::UdpSocket;

use crate::attacker::take;
use crate::honest::{Kind, dns_query};
use crate::scene::{A_NETWORK, DNS, Scene, Setup};

/// Names that a resolver never answers; more than may be in flight for one sandbox.
const SLOW: usize = 6000;
/// Names that B asks for, once each.
const QUICK: usize = 4000;

fn rules() -> String {
    let list = |pattern: &str, count: usize| {
        let names = (0..count).map(|at| format!("\"{}\"", pattern.replace('#', &at.to_string())));
        names.collect::<Vec<_>>().join(",")
    };
    format!(
        "[[allow]]\nname = \"slow\"\nhosts = [{}]\nresolves_to = [\"127.0.0.0/8\"]\n\
         [[allow]]\nname = \"quick\"\nhosts = [{}]\nresolves_to = [\"127.0.0.0/8\"]\n",
        list("n#.slow.example", SLOW),
        list("b#.quick.example", QUICK)
    )
}

#[test]
fn p20_look_ups_that_nobody_answers() {
    let kinds = vec![Kind::Tls, Kind::Plain, Kind::Dns, Kind::FreshName];
    let scene = Scene::with_setup(Setup { rules: rules(), kinds, ..Setup::default() });
    let (_, outcome) = scene.observe("6,000 look-ups without an answer, three times", async {
        // Each waits four seconds; A asks again meanwhile, by UDP and by tunnels that need a name.
        for round in 0..3_u16 {
            take(8, 8, move |part| async move {
                let socket = UdpSocket::bind(A_NETWORK.next_address()).await?;
                socket.connect(DNS).await?;
                for at in (part..SLOW).step_by(8) {
                    drop(socket.send(&dns_query(round, &format!("n{at}.slow.example"))).await);
                    tokio::task::yield_now().await;
                }
                Ok(())
            })
            .await;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        take(300, 300, |at| {
            let attacker = scene.attacker.clone();
            async move { attacker.open_tunnel(&format!("n{at}.slow.example:443")).await }
        })
        .await
    });
    outcome.assert_unharmed();
}

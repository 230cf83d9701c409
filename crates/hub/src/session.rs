//! One client's session.

use std::net::IpAddr;
use std::sync::Arc;

use tokio::time::Instant;

use crate::auth::Identity;
use crate::event::Wire;

/// What is fixed when a session opens.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    /// Random, unique over the fleet.
    pub id: Arc<str>,
    /// Who it is. `auth` may replace it; this is the identity at opening.
    pub identity: Arc<Identity>,
    /// The transport.
    pub wire: Wire,
    /// The client's address.
    pub address: IpAddr,
    /// When it opened.
    pub opened_at: Instant,
}

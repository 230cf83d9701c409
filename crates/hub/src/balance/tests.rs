//! The balancing against the figures it has to reach, on simulated fleets and on single readings.

mod faults;
mod moving;
mod readings;
mod sim;

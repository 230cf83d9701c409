//! OpenTelemetry: the spans of handshakes go out over OTLP where the standard variables say where to.
//! Off, and free of cost, where they do not. What is a span is decided where it happens; every such
//! span has the target `tidegate::trace`, so that `GATEWAY_LOG` and traces do not mix.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::runtime;
use opentelemetry_sdk::trace::SdkTracerProvider;
use opentelemetry_sdk::trace::span_processor_with_async_runtime::BatchSpanProcessor;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;

use super::CliError;
use super::logging::Extra;
use crate::config::Environment;
use crate::run::VERSION;

/// Either of them turns traces on (OpenTelemetry's own names).
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];

/// A collector that does not answer does not delay the end for longer.
const FLUSH: Duration = Duration::from_secs(2);

/// The exporter of this process.
pub struct Traces {
    provider: SdkTracerProvider,
}

impl Traces {
    /// `None` where no endpoint is set. Inside the main runtime, which sends the batches.
    ///
    /// # Errors
    /// `Usage` where the endpoint is none.
    pub fn from_environment(environment: &Environment, node: &str) -> Result<Option<Self>, CliError> {
        let is_set = |name: &&str| environment.get(*name).is_some_and(|value| !value.is_empty());
        let Some(variable) = ENDPOINTS.iter().find(|name| is_set(name)) else { return Ok(None) };
        let exporter = SpanExporter::builder()
            .with_http()
            .build()
            .map_err(|error| CliError::Usage(format!("{variable}: {error}")))?;
        let resource = Resource::builder()
            .with_service_name("tidegate")
            .with_attribute(KeyValue::new("service.version", VERSION))
            .with_attribute(KeyValue::new("service.instance.id", node.to_owned()))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            .with_span_processor(BatchSpanProcessor::builder(exporter, runtime::Tokio).build())
            .build();
        Ok(Some(Self { provider }))
    }

    /// What turns our spans into the exporter's.
    pub fn layer(&self) -> Extra {
        let ours = Targets::new().with_target("tidegate::trace", tracing::Level::DEBUG);
        tracing_opentelemetry::layer().with_tracer(self.provider.tracer("tidegate")).with_filter(ours).boxed()
    }

    /// Sends what is left, for at most two seconds. Outside the runtime, which must still be alive.
    pub fn end(self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH) {
            tracing::warn!(%error, "the last traces could not be sent");
        }
    }
}

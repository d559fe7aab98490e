"""The bus over NATS JetStream. Nothing else in the project imports nats."""

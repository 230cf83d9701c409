// What the tests here share: the real gateway binary and a real redis-server, each on free ports, and tokens made
// without a line of our own code's help. Decides nothing about the protocol; that is what the tests are for.
import { spawn, spawnSync } from "node:child_process";
import { createHmac } from "node:crypto";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { setTimeout as delay } from "node:timers/promises";
import { fileURLToPath } from "node:url";

export const root = join(dirname(fileURLToPath(import.meta.url)), "..");
const target = process.env.CARGO_TARGET_DIR ?? join(root, "target");
export const binary = process.env.TIDEGATE ?? join(target, "debug", "tidegate");
const SECRET = "a key of the strangers' tests, long enough for HMAC";
const PATIENCE_MS = 20_000;

// Whatever a test left behind goes with this process.
const children = new Set();
process.on("exit", () => children.forEach((child) => child.kill("SIGKILL")));

function launch(command, args, options) {
  const child = spawn(command, args, { stdio: ["ignore", "ignore", "pipe"], ...options });
  children.add(child);
  child.log = "";
  child.stderr.setEncoding("utf8").on("data", (text) => (child.log += text));
  child.gone = once(child, "exit").then(([code, signal]) => {
    children.delete(child);
    return signal ?? code;
  });
  return child;
}

/** Resolves with the first truthy value of `look`, asked again and again; fails with `what` after 20 s. */
export async function until(what, look) {
  const end = Date.now() + PATIENCE_MS;
  for (;;) {
    const found = await look();
    if (found) return found;
    if (Date.now() > end) throw new Error(`did not happen within ${PATIENCE_MS / 1000} s: ${what}`);
    await delay(20);
  }
}

/** A JWT (HS256) for `sub`, good for an hour; `claims` are added. The gateways here know `secret` unless told another. */
export function token(sub, claims = {}, secret = SECRET) {
  const part = (value) => Buffer.from(JSON.stringify(value)).toString("base64url");
  const now = Math.floor(Date.now() / 1000);
  const body = `${part({ alg: "HS256", typ: "JWT" })}.${part({ sub, iat: now, exp: now + 3600, ...claims })}`;
  return `${body}.${createHmac("sha256", secret).update(body).digest("base64url")}`;
}

async function freePort() {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  return port;
}

/** A redis-server of its own, nothing saved. `cli(...)` runs one command and returns its answer. */
export async function startRedis() {
  const dir = mkdtempSync(join(tmpdir(), "tidegate-redis-"));
  const port = await freePort();
  const args = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", dir];
  const child = launch("redis-server", args.map(String));
  const cli = (...words) => {
    const run = spawnSync("redis-cli", ["-h", "127.0.0.1", "-p", String(port), ...words], { encoding: "utf8" });
    return run.stdout.trim();
  };
  await until("redis-server answers", () => cli("PING") === "PONG");
  return {
    url: `redis://127.0.0.1:${port}`,
    cli,
    async stop() {
      child.kill("SIGKILL");
      await child.gone;
      rmSync(dir, { recursive: true, force: true });
    },
  };
}

/**
 * The real binary, once it serves. `env` is added to its environment; give `GATEWAY_LISTEN` a former
 * `gateway.public` to start it again where it was.
 */
export async function startGateway(env = {}) {
  const dir = mkdtempSync(join(tmpdir(), "tidegate-"));
  const file = join(dir, "addresses.json");
  const inherited = Object.entries(process.env).filter(([name]) => !name.startsWith("GATEWAY_"));
  const child = launch(binary, ["serve"], {
    env: {
      ...Object.fromEntries(inherited),
      GATEWAY_LISTEN: "127.0.0.1:0",
      GATEWAY_ADMIN_LISTEN: "127.0.0.1:0",
      GATEWAY_PROBE_LISTEN: "127.0.0.1:0",
      GATEWAY_ADDR_FILE: file,
      GATEWAY_JWT_SECRET: SECRET,
      GATEWAY_DRAIN_GRACE: "0s",
      ...env,
    },
  });
  const addresses = await until("the gateway serves", async () => {
    if (child.exitCode !== null) throw new Error(`the gateway ended at once:\n${child.log}`);
    try {
      const found = JSON.parse(readFileSync(file, "utf8"));
      return (await fetch(`http://${found.probes}/startupz`)).ok && found;
    } catch {
      return null;
    }
  });
  const end = async (signal) => {
    child.kill(signal);
    const how = await child.gone;
    rmSync(dir, { recursive: true, force: true });
    return how;
  };
  return {
    ...addresses,
    ws: `ws://${addresses.public}/v1/ws`,
    sse: `http://${addresses.public}/v1/sse`,
    get log() {
      return child.log;
    },
    /** Publishes over the admin API; returns the event's id. */
    async publish(channel, data, more = {}) {
      const answer = await fetch(`http://${addresses.admin}/v1/publish`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ channel, data, ...more }),
      });
      const body = await answer.json();
      if (answer.status !== 200) throw new Error(`publish: ${answer.status} ${JSON.stringify(body)}`);
      return body.id;
    },
    /** SIGTERM: drains; returns the exit code. */
    stop: () => end("SIGTERM"),
    /** SIGKILL: gone without a word. */
    kill: () => end("SIGKILL"),
  };
}

/** 1, 2, … n. */
export const upTo = (n) => Array.from({ length: n }, (_, i) => i + 1);

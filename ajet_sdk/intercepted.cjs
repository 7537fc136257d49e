// Loaded (NODE_OPTIONS=--require) into the Node.js programs that `ajet run --intercept` starts: what they open as TLS to
// port 443 goes by way of the HTTPS proxy that their environment names.
//
// Node heeds HTTPS_PROXY only from 22.21 on, only if told to, and not in agents that a library makes for itself. fetch,
// https, http2 and what is built on them open their connections by `tls.connect`: that one function is where this is
// done, alike in all versions. A caller that brings a connection of its own has its own way, and keeps it.
"use strict";

const http = require("node:http");
const { syncBuiltinESMExports } = require("node:module");
const net = require("node:net");
const { Duplex } = require("node:stream");
const tls = require("node:tls");

const { env } = process;
const proxy = env.HTTPS_PROXY ? new URL(env.HTTPS_PROXY) : null;
const direct = (env.NO_PROXY ?? "").split(",").map((entry) => entry.trim().replace(/^\*?\./, "")).filter(Boolean);

/** A byte stream to `target`, through the proxy. */
class Tunnel extends Duplex {
  constructor(target) {
    super();
    this.target = target;
    this.kept = true;
  }

  _construct(done) {
    const key = Buffer.from(`${decodeURIComponent(proxy.username)}:${decodeURIComponent(proxy.password)}`);
    const asking = http.request({
      agent: false,
      headers: { Host: this.target, "Proxy-Authorization": `Basic ${key.toString("base64")}` },
      host: proxy.hostname.replace(/^\[|\]$/g, ""),
      method: "CONNECT",
      path: this.target,
      port: proxy.port || 80,
    });
    asking.once("error", (error) => done(error));
    asking.once("connect", (answer, socket, head) => {
      if (answer.statusCode !== 200) {
        socket.destroy();
        done(new Error(`no tunnel to ${this.target}: ${answer.statusCode} ${answer.statusMessage}`));
        return;
      }
      this.socket = socket;
      this.keepAlive(this.kept);
      socket.on("data", (chunk) => this.push(chunk) || socket.pause());
      socket.once("end", () => this.push(null));
      socket.once("error", (error) => this.destroy(error));
      socket.once("close", () => this.destroy());
      if (head.length > 0) this.push(head);
      done();
    });
    asking.end();
  }

  /** Whether this keeps the program from its end; clients say no of connections that are idle. */
  keepAlive(kept) {
    this.kept = kept;
    if (kept) this.socket?.ref();
    else this.socket?.unref();
  }

  _read() {
    this.socket.resume();
  }

  _write(chunk, _encoding, done) {
    this.socket.write(chunk, done);
  }

  _final(done) {
    this.socket.end(done);
  }

  _destroy(error, done) {
    this.socket?.destroy();
    done(error);
  }
}

function goesDirect(host) {
  return net.isIP(host) !== 0 || direct.some((entry) => host === entry || host.endsWith(`.${entry}`));
}

/** `tls.connect` takes (options), (port, options) and (port, host, options), each with a callback after it. */
function optionsOf(given) {
  const options = Object.assign({}, ...given.filter((item) => item !== null && typeof item === "object"));
  if (typeof given[0] !== "object") options.port = given[0];
  if (typeof given[1] === "string") options.host = given[1];
  return options;
}

const connect = tls.connect;

tls.connect = function (...given) {
  const options = optionsOf(given);
  const { host } = options;
  if (proxy === null || options.socket || options.path || Number(options.port) !== 443 || !host || goesDirect(host)) {
    return connect.apply(this, given);
  }
  const callback = given.findLast((item) => typeof item === "function");
  const servername = options.servername ?? host;
  const tunnel = new Tunnel(`${host}:443`);
  const socket = connect.call(this, { ...options, servername, socket: tunnel }, callback);
  const { ref, unref } = socket;
  socket.ref = () => (tunnel.keepAlive(true), ref.call(socket));
  socket.unref = () => (tunnel.keepAlive(false), unref.call(socket));
  return socket;
};
syncBuiltinESMExports();

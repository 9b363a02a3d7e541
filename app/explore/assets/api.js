// The public API, as any other client has it.

let key = ""; // where the service wants one: kept in this page alone, never in its link

/** Send this key from now on. Raises an Error with a sentence for the reader where no header can hold it. */
export const useKey = (given) => {
  if (!/^[!-~]([ -~]*[!-~])?$/.test(given)) throw new Error("A key has letters, digits and signs of ASCII alone. Copy it again, as plain text.");
  key = given;
};

const NOT_THE_SERVICE = "The answer is not from the service: reload this page, in case a proxy before it wants you to sign in.";

/** A refusal: the problem that the service answered with, that it could not be reached, or that another answered for it. */
class Refused extends Error {
  constructor(status, problem, retryAfter) {
    super(problem.detail ?? problem.title ?? `The service cannot be reached${status ? `: a proxy before it answered ${status}` : ""}.`);
    Object.assign(this, { status, code: problem.code, retryAfter });
  }
}

/** Whether asking again can help after this status; 0 is a lost connection. */
export const isPassing = (status) => [0, 429, 503].includes(status);

/** The JSON reply of a path; with a body it is a POST. `milliseconds` is how long it took here. */
export async function call(path, body) {
  const started = performance.now();
  const headers = { accept: "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Refused(0, {}, 2);
  }
  const value = await reply.json().catch(() => null);
  if (!reply.ok) throw new Refused(reply.status, value ?? {}, Number(reply.headers.get("retry-after")) || undefined);
  if (!value) throw new Refused(reply.status, { detail: NOT_THE_SERVICE });
  return { value, milliseconds: performance.now() - started };
}

/** Runs `task` now, or once more when it has ended: one at a time, and the last call is never lost. */
export function latest(task) {
  let running = null,
    again = false;
  return () => {
    again = true;
    running ??= (async () => {
      while (again) {
        again = false;
        await task();
      }
    })().finally(() => {
      running = null;
    });
    return running;
  };
}

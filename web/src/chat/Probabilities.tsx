import { useState } from "preact/hooks";
import { labels } from "../text";
import { formatDecimal } from "../ui/format";
import type { TokenProbs } from "./tree";

function percent(logprob: number): string {
  const value = Math.exp(logprob) * 100;
  return value >= 0.1 ? `${formatDecimal(value, 1)}%` : `<${formatDecimal(0.1, 1)}%`;
}

function visible(token: string): string {
  return token.replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "∅";
}

/** An answer as tokens, with unlikely ones highlighted, and the candidates at the selected position. */
export function Probabilities({ tokens }: { tokens: TokenProbs[] }) {
  const t = labels.value.chat;
  const [chosen, setChosen] = useState<number | null>(null);
  const one = chosen === null ? null : tokens[chosen];
  return (
    <div class="probabilities">
      <div class="tokens">
        {tokens.map((token, index) => (
          <span
            key={index}
            class="token"
            tabIndex={0}
            role="button"
            aria-label={`${visible(token.token)}, ${percent(token.logprob)}`}
            style={{ "--unlikely": 1 - Math.exp(token.logprob) }}
            onMouseEnter={() => setChosen(index)}
            onFocus={() => setChosen(index)}
          >
            {token.token}
          </span>
        ))}
      </div>
      <div class="candidates" role="status">
        {one ? (
          <table>
            <caption>{t.tokenNumber(chosen! + 1)}</caption>
            <tbody>
              {(one.top.length ? one.top : [one]).map((other, index) => (
                <tr key={index} class={other.token === one.token ? "taken" : ""}>
                  <td>
                    <code>{visible(other.token)}</code>
                  </td>
                  <td>{percent(other.logprob)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        ) : (
          t.selectToken
        )}
      </div>
    </div>
  );
}
